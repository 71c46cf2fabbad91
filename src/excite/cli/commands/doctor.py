"""The command `excite doctor`."""

from __future__ import annotations

import typer

from excite.cli.shared import app


@app.command(short_help="Print versions, devices, extras and datasets, and problems.", epilog="Example: excite doctor")
def doctor() -> None:
    """Print versions, devices, extras and datasets on this machine, and any problems. Exit status 1: there are problems."""
    from excite.cli.diagnosis import diagnose

    diagnosis = diagnose()
    print(diagnosis)
    if diagnosis.problems:
        raise typer.Exit(1)
