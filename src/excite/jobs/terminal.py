"""Shows the progress of many jobs on a terminal; on a pipe, prints a line every ten seconds."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from excite.jobs.progress import JobProgress, ProgressTracker

_MAX_ROWS, _INTERVAL = 12, 10.0  # jobs shown at once; seconds between lines on a pipe


class JobView:
    """An `ProgressCallback` callback that shows all jobs; at the end it lists those that failed, with reason and log.

    Args:
        console: Where to show them.
        interval: Seconds between two lines on a pipe.

    Example:
        While jobs run::

            with JobView(Console()) as view:
                run_jobs(jobs, on_progress=view)
    """

    def __init__(self, console: Console, interval: float = _INTERVAL) -> None:
        self.console, self.interval = console, interval
        self.tracker = ProgressTracker()
        self._started, self._next_line, self._failures, self._line = False, 0.0, 0, ""
        self._live = (
            Live(get_renderable=self._render, console=console, refresh_per_second=4) if console.is_terminal else None
        )

    def __enter__(self) -> JobView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        elif self.tracker.jobs:
            self._print_summary()
        failed = self.tracker.with_status("failed")
        if self._live is None:
            for job in failed:  # each in full on one line, for programs that read the pipe
                self._print(f"failed: {job.name}: {job.reason}{f' (log: {job.log})' if job.log else ''}")
        elif failed:
            table = Table(box=None, pad_edge=False, title="failed", title_justify="left", title_style="bold")
            for heading in ("job", "reason", "log"):
                table.add_column(heading, overflow="fold")
            for job in failed:
                table.add_row(Text(job.name), Text(job.reason or ""), Text(job.log or ""))
            self.console.print(table)

    def __call__(self, progress: JobProgress) -> None:
        """Updates the view; without a terminal a line is printed at most every few seconds, and for each failure."""
        self.tracker.update(progress)
        self._started = self._started or progress.status in ("running", "failed")
        if self._live is not None or not self._started:
            return
        failures = self.tracker.count("failed")
        if failures > self._failures or time.monotonic() >= self._next_line:
            self._failures, self._next_line = failures, time.monotonic() + self.interval
            self._print_summary()

    def _print_summary(self) -> None:
        line = str(self.tracker)
        if line != self._line:
            self._line = line
            self._print(line)

    def _print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _render(self) -> Group:
        if not self.tracker.jobs:
            return Group()
        rows = Table.grid(padding=(0, 2))
        rows.add_column(overflow="ellipsis", no_wrap=True)
        for width in (12, 20, 5):
            rows.add_column(width=width, no_wrap=True)
        running = self.tracker.with_status("running")
        for job in running[:_MAX_ROWS]:
            bar = ProgressBar(1.0, job.fraction, width=20)
            rows.add_row(Text(job.name), Text(job.phase), bar, f"{100 * job.fraction:3.0f} %")
        if len(running) > _MAX_ROWS:
            rows.add_row(Text(f"and {len(running) - _MAX_ROWS} more"))
        total = Table.grid()
        total.add_row(ProgressBar(len(self.tracker.jobs), self.tracker.done, width=60))
        return Group(Text(str(self.tracker)), total, rows)
