"""The command `excite report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from excite.cli.shared import app, open_in_browser, print_line, print_summary


@app.command(
    short_help="Write one self-contained HTML file on one or more runs.",
    epilog="Example: excite report runs/demo --out report.html",
)
def report(
    runs: Annotated[list[str], typer.Argument(help="Run folders, folders of runs, or URLs of either.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Title of the report; by default the name of the run.")] = None,
    open_report: Annotated[bool, typer.Option("--open/--no-open", help="Open the report in a browser.")] = False,
) -> None:
    """Write one self-contained HTML file on one or more runs; it needs no network."""
    from excite.report import make_report

    made = make_report(runs)
    path = made.write(out, title)
    print_summary(made)
    print_line(f"report: {path}")
    if open_report:
        open_in_browser(path)
