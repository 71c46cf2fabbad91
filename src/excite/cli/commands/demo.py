"""The command `excite demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from excite.cli.shared import app, console, open_in_browser, print_line, print_summary


@app.command(
    short_help="Train three ways on digits, compare margins, write a report.",
    epilog="Example: excite demo --out runs/demo --seeds 8",
)
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs and the report.")] = Path("runs/demo"),
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of seeds; each draws a data split and initial weights.")
    ] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs per training; fewer for a quick try.")] = 60,
    workers: Annotated[int, typer.Option(min=1, help="Number of training runs in parallel.")] = 2,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over instead of continuing the runs in the folder.")
    ] = False,
    open_report: Annotated[bool, typer.Option("--open/--no-open", help="Open the report in a browser.")] = True,
) -> None:
    """Train a small network three ways on handwritten digits, compare margins, write a report."""
    import shutil

    from excite.jobs.scheduler import run_jobs
    from excite.jobs.terminal import JobView
    from excite.report import make_report
    from excite.studies.demo import demo_jobs
    from excite.train.stopping import stop_signals

    jobs = demo_jobs(out, seeds, epochs)
    if fresh:
        for job in jobs:
            if (job.folder / "run.json").exists():
                shutil.rmtree(job.folder)
    with stop_signals(), JobView(console) as view:
        run_jobs(jobs, workers, view)
    report = make_report([job.folder for job in jobs])
    path = report.write(out / "report.html", "Three ways to train: margins on digits 8 and 9")
    print_summary(report)
    print_line(f"report: {path}")
    if open_report:
        open_in_browser(path)
