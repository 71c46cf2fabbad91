"""The command `excite train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from excite.cli.shared import app, print_line, print_summary, progress_bars


@app.command(
    short_help="Train from a config file; resumes automatically.",
    epilog="Example: excite train config.toml --run runs/first",
)
def train(
    config: Annotated[Path, typer.Argument(help="TOML or JSON file.")],
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", "--folder", help="Run folder; by default runs/NAME-OF-THE-CONFIG. (torchrun has another --run.)"
        ),
    ] = None,
    margins: Annotated[bool, typer.Option("--margins/--no-margins", help="Measure margins after the training.")] = True,
) -> None:
    """Train from a config file. An existing run is continued from its last checkpoint.

    On several processes: torchrun --nproc-per-node 2 -m excite train CONFIG.
    """
    from contextlib import ExitStack

    from excite.report import make_report
    from excite.train.config import load_config
    from excite.train.distributed.processes import many_processes, rank0_only
    from excite.train.evaluate import load_model, measure
    from excite.train.from_config import train_across
    from excite.train.stopping import stop_signals

    with rank0_only():
        settings = load_config(config)
    folder = run or Path("runs") / config.stem
    with stop_signals(), ExitStack() as stack:
        processes = stack.enter_context(many_processes(settings.device))
        if not processes.first:
            train_across(settings, folder)
            return
        progress = stack.enter_context(progress_bars())
        trained = train_across(settings, folder, progress=progress)
        assert trained is not None
        trained.close()
        processes.destroy()  # the first process alone measures
        # The checkpoint is built by its config, which is the user's: `train_across` refuses a run of another one.
        saved = load_model(trained.checkpoints()[-1].path, trust=True)
        if margins and saved.data.classes:
            measure(saved, progress=progress)
    print_summary(make_report([folder]))
    print_line(f"run: {folder}")
