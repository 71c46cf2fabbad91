"""The command `excite audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from excite.cli.shared import (
    DataName,
    InputBounds,
    ModelName,
    ModelOptions,
    Normalize,
    Trust,
    app,
    load_saved,
    open_in_browser,
    print_headline,
    print_line,
    progress_bars,
)


@app.command(
    short_help="Write one page on a saved model: layers, theorems, margins.",
    epilog="Example: excite audit runs/first --out audit.html",
)
def audit(
    checkpoint: Annotated[Path, typer.Argument(help="A run folder, a checkpoint in one, or a file of weights.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("audit.html"),
    points: Annotated[int, typer.Option(min=1, help="Maximal number of training and of test points.")] = 1000,
    units: Annotated[bool, typer.Option("--units/--no-units", help="Examine every unit of every layer.")] = True,
    margins: Annotated[
        bool, typer.Option("--margins/--no-margins", help="Show margins; measure them if the run has none.")
    ] = True,
    model: ModelName = None,
    options: ModelOptions = None,
    data: DataName = None,
    normalize: Normalize = None,
    bounds: InputBounds = None,
    trust: Trust = False,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """Write one page on a saved model: richness of layers, deficient units, theorems, Lipschitz constants, margins."""
    from excite.report.audit import audit as audit_model
    from excite.train.evaluate import why_not_stored

    saved = load_saved(checkpoint, model, options, data, normalize, bounds, trust)
    with progress_bars(single=True) as progress:
        result = audit_model(saved, points=points, units=units, with_margins=margins, progress=progress)
    path = result.write(out)
    print_headline(result.headline)
    print_line(result)
    print_line(f"page: {path}")
    reason = why_not_stored(saved)
    if reason is None:
        result.keep(saved.folder)
    else:
        print_line(f"not stored in the run: {reason}")
    if open_page:
        open_in_browser(path)
