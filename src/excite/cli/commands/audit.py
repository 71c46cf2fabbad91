"""The command `excite audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from excite.cli.shared import Trust, app, open_in_browser, print_line, progress_bars
from excite.errors import RunError


@app.command(epilog="Example: excite audit runs/first --out audit.html")
def audit(
    checkpoint: Annotated[Path, typer.Argument(help="A run folder, or a checkpoint file in one.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("audit.html"),
    points: Annotated[int, typer.Option(min=1, help="Maximal number of training and of test points.")] = 1000,
    units: Annotated[bool, typer.Option("--units/--no-units", help="Examine every unit of every layer.")] = True,
    margins: Annotated[
        bool, typer.Option("--margins/--no-margins", help="Show margins; measure them if the run has none.")
    ] = True,
    trust: Trust = False,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """Write one page on a saved model: richness of layers, deficient units, theorems, Lipschitz constants, margins."""
    from excite.report.audit import audit as audit_model
    from excite.train.evaluate import load_model

    saved = load_model(checkpoint, trust=trust)
    with progress_bars(single=True) as progress:
        result = audit_model(saved, points=points, units=units, with_margins=margins, progress=progress)
    path = result.write(out)
    print_line(result)
    print_line(f"page: {path}")
    try:
        result.keep(saved.run)
    except RunError as error:
        print_line(f"not stored in the run: {error}")
    if open_page:
        open_in_browser(path)
