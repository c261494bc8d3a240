"""What takes long, shown on stderr while it lasts and gone when it is over.

Nothing appears in the first two seconds, when stderr is no terminal, with `--quiet` or NO_COLOR.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.progress

DELAY_S = 2.0


class Progress:
    """`with Progress(quiet) as progress: progress(0.3, "loading")`, 0.3 being the share done.

    None instead of a share is work of unknown length. A new label replaces what is shown. May be
    called from any thread.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.visible = not quiet and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        self._display: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID
        self._shown: tuple[str, bool] | None = None  # label, and whether its length is unknown
        self._lock = threading.Lock()

    def __call__(self, share: float | None, label: str) -> None:
        with self._lock:
            if not self.visible:
                return
            if self._display is None:
                self._display = _display()
                self._display.start()
            shown = (label, share is None)
            if shown != self._shown:
                for task in self._display.task_ids:
                    self._display.remove_task(task)
                self._task = self._display.add_task(
                    label, total=None if share is None else 1.0, percent=""
                )
                self._shown = shown
            percent = "" if share is None else f"{100 * share:3.0f} %"
            self._display.update(self._task, completed=share or 0.0, percent=percent)

    def stop(self) -> None:
        """Takes the display away for good, before something else is printed."""
        with self._lock:
            self.visible = False
            self._take_away()

    def pause(self) -> None:
        """Takes the display away until the next call, for a line to be printed."""
        with self._lock:
            self._take_away()

    def _take_away(self) -> None:
        if self._display is not None:
            self._display.stop()
            self._display = self._shown = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _display() -> rich.progress.Progress:
    from collections.abc import Iterable

    from rich.console import Console, RenderableType
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    start = time.monotonic()

    class Late(RichProgress):
        def get_renderables(self) -> Iterable[RenderableType]:
            if time.monotonic() - start >= DELAY_S:
                yield from super().get_renderables()

    return Late(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[percent]}", markup=False),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
