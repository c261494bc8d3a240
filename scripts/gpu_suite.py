"""Runs what needs a GPU and writes tests/gpu_receipt.json. Called by gpu_suite.sh.

    bench       minidecode bench of a small model with three kernel sets
    sanitizer   compute-sanitizer's four tools over every kernel but torch.mv's
                (scripts/sanitize.py)
    tests       pytest -m gpu
    stage       only for machines without a network: joins the example model's GGUF from
                .stage/part0 and .stage/part1, which may come in two calls, and puts it into
                the cache; .stage/gguf is the unpacked wheel of that name

A part that was not asked for keeps the result of an earlier run on the same sources. Each part has
a time limit, and all of them together SUITE_SECONDS (560 by default).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import receipt as receipts

ROOT = receipts.ROOT
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# GEMVs in Python that the tools look at; inductor compiles for every shape, so by dtype.
IN_PYTHON = ("triton_rowblock", "inductor fp16", "inductor fp32", "cublas")
LIMITS = {"stage": 120, "bench": 120, "sanitizer": 400, "tests": 580}
BENCH = (
    *("-m", "synthetic:smollm2-135m", "-p", "0", "-d", "128", "-n", "128", "-r", "3"),
    *("--kernel", "fused,half2_block,cublas", "--device", "cuda", "-o", "json", "-q"),
)
# Tests that measure: they have the GPU to themselves.
TIMED = (
    "test_bench_device.py",
    "test_bench_timer.py",
    "test_gpu_gemv.py",
    "test_gpu_measure.py",
)
# Where the parts of the example wait for each other between two calls on one machine.
STAGED = Path(tempfile.gettempdir()) / "minidecode-stage"
PARTS_OF_EXAMPLE = 2


@dataclass(frozen=True)
class Done:
    """A finished command: exit status (None: killed at its time limit), output, seconds."""

    status: int | None
    output: str
    seconds: float


def run(command: Sequence[str], limit: float, log: Path, **environment: str) -> Done:
    """Run a command with all its output in `log`, and kill it with its children at the limit."""
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as sink:
        sink.write(f"$ {' '.join(command)}\n")
        sink.flush()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None
        try:
            status = process.wait(max(limit, 1.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
            sink.write(f"\nkilled after {limit:.0f} s\n")
    return Done(status, text_of(log), time.monotonic() - began)


def to_file(target: Path, command: Sequence[str]) -> list[str]:
    """The command with its stdout, a document of its own, in `target`."""
    return ["bash", "-c", 'out=$1; shift; exec "$@" > "$out"', "bash", str(target), *command]


def json_of(path: Path) -> Any:
    """The document in `path`; None if there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def outcome(ok: bool, summary: str, seconds: float, **more: Any) -> dict[str, Any]:
    """One part of the receipt."""
    result = receipts.PASSED if ok else receipts.FAILED
    return {"result": result, "summary": summary, "seconds": round(seconds, 1), **more}


# --- tests ----------------------------------------------------------------------------------------


def run_tests(
    folder: Path, limit: float, alone: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """`alone` returns when nothing else uses the GPU: only then is anything measured."""
    end = time.monotonic() + limit
    # The others may need packages that a GPU machine does not have, even to be looked at.
    files = [p for p in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in text_of(p)]
    timed = [p for p in files if p.name in TIMED]
    checks = [p for p in files if p not in timed]
    (folder / "tests.log").write_text("")
    first = pytest(folder, checks, limit, parallel=True)
    alone()
    second = pytest(folder, timed, end - time.monotonic(), parallel=False)
    ok = first["result"] == second["result"] == receipts.PASSED
    counts = {
        name: first.get(name, 0) + second.get(name, 0) for name in ("passed", "failed", "skipped")
    }
    failures = first.get("failures", []) + second.get("failures", [])
    summary = first["summary"] + "; timed ones: " + second["summary"]
    seconds = first["seconds"] + second["seconds"]
    return outcome(ok, summary, seconds, **counts, failures=failures)


def pytest(folder: Path, files: Sequence[Path], limit: float, *, parallel: bool) -> dict[str, Any]:
    """Run the GPU tests of these files, in several processes if pytest-xdist is there."""
    junit = folder / "junit.xml"
    junit.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={junit}"]
    if parallel and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(12, os.cpu_count() or 1)), "--dist", "worksteal"]
    log = folder / "pytest.log"
    command += [*map(str, files), "-p", "no:cacheprovider", "-rfE", "--durations=15", "--color=no"]
    # A filter from outside must not make half a run look like all of it.
    done = run(command, limit, log, PYTEST_ADDOPTS="", CI="")
    with (folder / "tests.log").open("a", encoding="utf-8") as whole:
        whole.write(done.output)
    log.unlink()
    if done.status is None:
        return outcome(False, f"no end after {limit:.0f} s", done.seconds)
    return tests_outcome(junit, done)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def tests_outcome(junit: Path, done: Done) -> dict[str, Any]:
    """What pytest's report says; a run that tested nothing has failed."""
    try:
        suites = list(ET.parse(junit).getroot().iter("testsuite"))
    except (OSError, ET.ParseError) as error:
        return outcome(False, f"pytest left no report ({error})", done.seconds)

    def count(name: str) -> int:
        return sum(int(suite.get(name, "0")) for suite in suites)

    failed, skipped = count("failures") + count("errors"), count("skipped")
    passed = count("tests") - failed - skipped
    names = [
        f"{case.get('classname')}::{case.get('name')}"
        for suite in suites
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    ok = done.status == 0 and failed == 0 and passed > 0
    counts = {"passed": passed, "failed": failed, "skipped": skipped}
    summary = f"{passed} passed, {failed} failed, {skipped} skipped"
    return outcome(ok, summary, done.seconds, **counts, failures=names[:20])


# --- sanitizer ------------------------------------------------------------------------------------


def run_sanitizer(folder: Path, limit: float) -> dict[str, Any]:
    began = time.monotonic()
    log = folder / "sanitizer.log"
    if shutil.which("compute-sanitizer") is None:
        log.write_text("compute-sanitizer is not on PATH\n")
        return outcome(False, "compute-sanitizer is not on PATH", 0.0)
    with tempfile.TemporaryDirectory() as scratch:
        built = f"{scratch}/kernels"
        # First without a tool, so that what it looks at is compiled and tuned by then.
        prepared = {
            "CUDA": (["build", built], ["run", built]),
            **{name: (["python", *name.split()],) * 2 for name in IN_PYTHON},
        }
        caches = {
            f"{name}_CACHE_DIR": f"{scratch}/{name.lower()}" for name in ("TRITON", "TORCHINDUCTOR")
        }

        def call(name: str, arguments: Sequence[str], *before: str) -> Done:
            command = [*before, sys.executable, str(ROOT / "scripts" / "sanitize.py"), *arguments]
            left = limit - (time.monotonic() - began)
            return run(command, left, Path(scratch) / f"{name}.log", **caches)

        def look(whose: str) -> dict[str, Done]:
            preparation, arguments = prepared[whose]
            made = call(whose, preparation)
            if made.status != 0:
                return {f"{whose} without a tool": made}

            def under(tool: str) -> Done:
                # On a busy machine Python may take more than the usual 10 s to reach the driver.
                options = ["--tool", tool, "--launch-timeout", "120", "--error-exitcode", "99"]
                options += ["--target-processes", "all"]
                return call(f"{tool}-{whose}", arguments, "compute-sanitizer", *options)

            with ThreadPoolExecutor(len(TOOLS)) as pool:
                done = pool.map(under, TOOLS)
                return {f"{tool} {whose}": result for tool, result in zip(TOOLS, done, strict=True)}

        with ThreadPoolExecutor(len(prepared)) as pool:
            looked = dict(job for jobs in pool.map(look, prepared) for job in jobs.items())
    logs = (f"{job}, {done.seconds:.0f} s\n{done.output}" for job, done in looked.items())
    log.write_text("\n\n".join(logs), encoding="utf-8")
    faults = {job: fault for job, done in looked.items() if (fault := sanitizer_fault(done))}
    summary = "; ".join(f"{job}: {fault}" for job, fault in faults.items())
    counts = {"passed": len(looked) - len(faults), "failed": len(faults)}
    seconds = time.monotonic() - began
    return outcome(not faults, summary or f"{', '.join(TOOLS)} clean", seconds, **counts)


def sanitizer_fault(done: Done) -> str:
    """What a tool found, or "" if it saw every call and found nothing."""
    if done.status is None:
        return f"no end after {done.seconds:.0f} s"
    # What kind of summary a tool prints is its own affair; all of them name a number.
    summaries = re.findall(r"SUMMARY: (.*)", done.output)
    faults: list[str] = [s for s in summaries if not re.match(r"0 (errors|hazards)\b", s)]
    called = re.search(r"sanitize\.py: (\d+) calls .* (\d+) refused, 0 wrong", done.output)
    if faults:
        return faults[0]
    if not summaries:
        return f"exit status {done.status} and no summary"
    if done.status == 0 and called is not None and int(called[1]) > int(called[2]):
        return ""
    return f"exit status {done.status}"


# --- bench ----------------------------------------------------------------------------------------


def run_bench(folder: Path, limit: float) -> dict[str, Any]:
    target = folder / "bench.json"
    log = folder / "bench.log"
    command = [sys.executable, "-m", "minidecode", "bench", *BENCH]
    done = run(to_file(target, command), limit, log)
    if done.status is None:
        return outcome(False, f"no end after {limit:.0f} s", done.seconds)
    rows = json_of(target) or []
    last = done.output.strip().splitlines()[-1] if done.status != 0 else ""
    return bench_outcome(rows, done, last)


def bench_outcome(rows: Sequence[Mapping[str, Any]], done: Done, said: str = "") -> dict[str, Any]:
    """The rates of each kernel set; failed when one of them is missing."""
    kept = [
        {key: row.get(key) for key in ("kernel", "engine", "n_depth", "avg_ts", "pct_read_bw")}
        for row in rows
    ]
    wanted = BENCH[BENCH.index("--kernel") + 1].split(",")
    there = [str(row["kernel"]) for row in kept if row["avg_ts"]]
    ok = done.status == 0 and there == wanted
    rates = ", ".join(f"{row['kernel']} {row['avg_ts']:.0f} tok/s" for row in kept if row["avg_ts"])
    return outcome(ok, rates if ok else said or f"rows of {there}", done.seconds, rows=kept)


# --- the example model ----------------------------------------------------------------------------


def run_stage(folder: Path, limit: float) -> dict[str, Any]:
    """Bring the parts that came with this call, and fetch the example once both are there."""
    STAGED.mkdir(exist_ok=True)
    brought = ROOT / ".stage"
    for part in sorted(brought.glob("part*")):
        shutil.copy(part, STAGED / part.name)
    if (brought / "gguf").is_dir():
        shutil.copytree(brought / "gguf", STAGED / "gguf", dirs_exist_ok=True)
    parts = sorted(STAGED.glob("part*"))
    if len(parts) < PARTS_OF_EXAMPLE or not (STAGED / "gguf").is_dir():
        return outcome(True, f"{len(parts)} parts so far", 0.0)
    whole = STAGED / "example.gguf"
    with whole.open("wb") as sink:
        for part in parts:
            sink.write(part.read_bytes())
    path = os.pathsep.join([str(STAGED / "gguf"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "minidecode", "fetch", "--from", str(whole)]
    done = run(command, limit, folder / "stage.log", PYTHONPATH=path)
    last = done.output.strip().splitlines()[-1]
    return outcome(done.status == 0, last, done.seconds)


# --- all of it ------------------------------------------------------------------------------------


def environment() -> dict[str, Any] | None:
    """Machine and versions, as `minidecode env` has them, without paths; None where it fails."""
    command = [sys.executable, "-m", "minidecode", "env", "--json"]
    with tempfile.TemporaryDirectory() as scratch:
        target, log = Path(scratch) / "env.json", Path(scratch) / "env.log"
        done = run(to_file(target, command), 60, log)
        found = json_of(target)
    if not isinstance(found, dict):
        print(done.output, file=sys.stderr)
        return None
    machine: dict[str, Any] = found["environment"]
    return machine


def has_gpu() -> bool:
    command = [sys.executable, "-c", "import torch, sys; sys.exit(not torch.cuda.is_available())"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def table(parts: Mapping[str, Mapping[str, Any]], receipt: Mapping[str, Any]) -> str:
    """The end of the output: a line a part."""
    lines = [f"{'part':10} {'result':8} {'seconds':>8}  what"]
    for name, part in parts.items():
        lines.append(f"{name:10} {part['result']:8} {part['seconds']:8.1f}  {part['summary']}")
    state = f"receipt: {receipt['result']} {receipt['reason']}".rstrip()
    return "\n".join([*lines, f"{state}  (sources {receipt['sources'][:12]})"])


# In the order in which they run: the tests get the time that the others leave.
RUNNERS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "stage": run_stage,
    "bench": run_bench,
    "sanitizer": run_sanitizer,
    "tests": run_tests,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = os.environ.get("SUITE", "").split() or list(receipts.PARTS)
    parser.add_argument("parts", nargs="*", default=default, metavar="part")
    args = parser.parse_args(arguments)
    unknown = sorted(set(args.parts) - set(RUNNERS))
    if unknown:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(RUNNERS)}")
    if not has_gpu():
        print("gpu_suite: torch sees no CUDA GPU here; nothing was run", file=sys.stderr)
        return 5

    end = time.monotonic() + float(os.environ.get("SUITE_SECONDS", "560"))
    out = os.environ.get("OUT")
    folder = Path(out) if out else ROOT / "dist" / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    found = environment()
    parts: dict[str, dict[str, Any]] = {}

    def run_part(name: str, *more: Any) -> None:
        left = min(LIMITS[name], end - time.monotonic() - 5)
        if left < 10:
            parts[name] = outcome(False, "no time was left", 0.0)
            return
        print(f"gpu_suite: {name} …", flush=True)
        parts[name] = RUNNERS[name](folder, left, *more)
        if parts[name]["result"] == receipts.FAILED:
            log = folder / f"{name}.log"
            print(text_of(log)[-6000:] if log.exists() else "")

    with ThreadPoolExecutor(1) as pool:
        beside: Future[None] | None = None
        for name in (name for name in RUNNERS if name in args.parts):
            if name == "sanitizer":
                # It keeps the CPU busy and not the GPU: the tests may begin beside it.
                beside = pool.submit(run_part, name)
            elif name == "tests" and beside is not None:
                run_part(name, beside.result)
            else:
                run_part(name)
        if beside is not None:
            beside.result()  # raises what went wrong in it

    try:
        earlier = receipts.read()
    except receipts.ReceiptError:
        earlier = None
    counted = {name: part for name, part in parts.items() if name in receipts.PARTS}
    receipt = receipts.make(counted, found, earlier)
    if counted:
        receipts.write(receipt)
        shutil.copy(receipts.RECEIPT, folder / receipts.RECEIPT.name)
    print(table(parts, receipt))
    return 1 if any(part["result"] == receipts.FAILED for part in parts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
