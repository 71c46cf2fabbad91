"""The command `excite sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from excite.cli.shared import GpusPerJob, On, Retries, Workers, app, console, print_line


@app.command(
    short_help="Train every combination of a config's lists and ranges.",
    epilog="Example: excite sweep sweep.toml --on local --workers 4",
)
def sweep(
    config: Annotated[Path, typer.Argument(help="TOML or JSON file: a training config with a table [sweep].")],
    out: Annotated[
        str | None, typer.Option(help="Folder or URL for the runs; by default runs/sweeps/NAME-OF-THE-CONFIG.")
    ] = None,
    workers: Workers = 2,
    on: On = None,
    gpus_per_job: GpusPerJob = 0.0,
    retries: Retries = 1,
) -> None:
    """Train every combination of a config's lists and ranges, and compare. Finished training runs are not repeated."""
    from excite.jobs.preload import preload

    preload(on, workers)
    from excite.errors import RunError
    from excite.jobs.executors import find_executor
    from excite.jobs.sweep import read_sweep, run_sweep
    from excite.jobs.terminal import JobView
    from excite.train.stopping import stop_signals

    planned = read_sweep(config, out or Path("runs/sweeps") / config.stem)
    executor = find_executor(on, workers, gpus_per_job, retries)
    with stop_signals(), JobView(console) as view:
        result = run_sweep(planned, workers, view, executor, retries=retries)
    print(result)
    print_line(f"results: {planned.workspace}/sweep.json")
    if result.failed is not None:
        raise RunError(result.failed)
