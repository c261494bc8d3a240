"use strict";
(() => {
  const table = document.getElementById("rows");
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const heads = Array.from(table.tHead.rows[0].cells);

  // What is not known has no data-v and stays last in either direction.
  const compare = (x, y, numeric, sign) => {
    if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
    const order = numeric ? Number(x) - Number(y) : x.localeCompare(y, "en", { numeric: true });
    return sign * order;
  };

  const sortBy = (index) => {
    const head = heads[index];
    const numeric = !head.classList.contains("text");
    const first = numeric ? "descending" : "ascending";
    const second = numeric ? "ascending" : "descending";
    const direction = head.getAttribute("aria-sort") === first ? second : first;
    for (const other of heads) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", direction);
    const sign = direction === "ascending" ? 1 : -1;
    const value = (row) => row.cells[index].dataset.v;
    rows.sort((a, b) => compare(value(a), value(b), numeric, sign) || a.dataset.i - b.dataset.i);
    body.append(...rows);
  };
  heads.forEach((head, index) => {
    head.querySelector("button").addEventListener("click", () => sortBy(index));
  });

  const filter = document.getElementById("filter");
  const shown = document.getElementById("shown");
  const apply = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const text = row.dataset.text;
      row.hidden = !words.every((word) => text.includes(word));
      count += row.hidden ? 0 : 1;
    }
    shown.textContent = `${count} of ${rows.length} ops`;
  };
  filter.addEventListener("input", apply);

  // A segment of the strip may lead to a row that the filter hides.
  addEventListener("hashchange", () => {
    const target = document.getElementById(location.hash.slice(1));
    if (target && target.hidden) {
      filter.value = "";
      apply();
      target.scrollIntoView();
    }
  });
})();
