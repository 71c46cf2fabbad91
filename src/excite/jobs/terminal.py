"""One view of many pieces of work on a terminal, kept up to date; on a pipe a line now and then."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from excite.jobs.progress import Tally

_ROWS, _PAUSE = 12, 10.0  # pieces of work shown at once; seconds between lines on a pipe


class TaskView:
    """Call it with a tally whenever that has changed. The end says what failed, why, and where its log is."""

    def __init__(self, console: Console, pause: float = _PAUSE) -> None:
        self.console, self.pause = console, pause
        self.tally: Tally | None = None
        self._next, self._failed, self._line = 0.0, 0, ""
        self._live = (
            Live(get_renderable=self._drawn, console=console, refresh_per_second=4) if console.is_terminal else None
        )

    def __enter__(self) -> TaskView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        elif self.tally is not None:
            self._print()
        failed = [] if self.tally is None else self.tally.of("failed")
        if self._live is None:
            for entry in failed:  # whole on a line each, for whatever reads the pipe
                self._say(f"failed: {entry.name}: {entry.reason} (log: {entry.log})")
        elif failed:
            table = Table(box=None, pad_edge=False, title="failed", title_justify="left", title_style="bold")
            for heading in ("task", "why", "log"):
                table.add_column(heading, overflow="fold")
            for entry in failed:
                table.add_row(Text(entry.name), Text(entry.reason or ""), Text(entry.log))
            self.console.print(table)

    def __call__(self, tally: Tally) -> None:
        self.tally = tally
        if self._live is None:
            failed = tally.count("failed")
            if failed > self._failed or time.monotonic() >= self._next:
                self._failed, self._next = failed, time.monotonic() + self.pause
                self._print()

    def _print(self) -> None:
        line = str(self.tally)
        if line != self._line:
            self._line = line
            self._say(line)

    def _say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _drawn(self) -> Group:
        if self.tally is None:
            return Group()
        rows = Table.grid(padding=(0, 2))
        rows.add_column(overflow="ellipsis", no_wrap=True)
        for width in (12, 20, 5):
            rows.add_column(width=width, no_wrap=True)
        running = self.tally.of("running")
        for entry in running[:_ROWS]:
            share = ProgressBar(1.0, entry.share, width=20)
            rows.add_row(Text(entry.name), Text(entry.phase), share, f"{100 * entry.share:3.0f} %")
        if len(running) > _ROWS:
            rows.add_row(Text(f"and {len(running) - _ROWS} more"))
        bar = Table.grid()
        bar.add_row(ProgressBar(max(len(self.tally.entries), 1), self.tally.done, width=60))
        return Group(Text(str(self.tally)), bar, rows)
