"""The command `excite repair`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from excite.cli.shared import app


@app.command(epilog="Example: excite repair runs/first --dry-run")
def repair(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check; change nothing.")] = False,
) -> None:
    """Check a run folder and repair it where possible. Replaced files stay in the run. Exit status 1: problems remain."""
    from excite.runs import repair as repair_run

    result = repair_run(run, dry_run=dry_run)
    print(result)
    if not result.whole:
        raise typer.Exit(1)
