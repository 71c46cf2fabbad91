"""The commands `excite study list` and `excite study run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from excite.cli.shared import GpusPerJob, On, Retries, Workers, add_group, console, print_line

study_app = add_group("study", "List and run the experiments of the papers.")


@study_app.command("list", epilog="Example: excite study list")
def study_list() -> None:
    """List the studies and the claims that each of them tests."""
    from rich.table import Table

    from excite.studies import STUDIES

    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    for heading in ("name", "claims", "scales"):
        table.add_column(heading, overflow="fold")
    for name, study in STUDIES.items():
        claims = [f"• {claim.text}" for claim in study.claims(study.scales["quick"])]
        table.add_row(name, "\n".join([f"{study.title}: {study.figure}", *claims]), ", ".join(study.scales))
    console.print(table)


@study_app.command("run", epilog="Example: excite study run margin-layers --scale quick --workers 2")
def study_run(
    name: Annotated[str, typer.Argument(help="Name of a study from `excite study list`.")],
    scale: Annotated[
        str, typer.Option(help="quick (minutes on two cores) or paper (the authors' settings).")
    ] = "quick",
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds per variant; by default the scale's own.")] = None,
    out: Annotated[
        str | None, typer.Option(help="Folder or URL for the results; by default runs/studies/NAME-SCALE.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; by default a GPU, if available, for scale paper.")
    ] = None,
    workers: Workers = 2,
    variants: Annotated[
        str | None,
        typer.Option(help="figure: those of the papers' figure; all: the others too (default for scale paper)."),
    ] = None,
    docs: Annotated[
        Path | None, typer.Option(help="Also write the results page and its images to this folder.")
    ] = None,
    on: On = None,
    gpus_per_job: GpusPerJob = 0.0,
    retries: Retries = 1,
) -> None:
    """Run an experiment of the papers and judge its claims. Finished trainings are not repeated."""
    from excite.jobs.preload import preload

    preload(on, workers)
    from excite.jobs.executors import find_executor
    from excite.jobs.terminal import JobView
    from excite.runs.store import is_url
    from excite.studies import run
    from excite.train.stopping import stop_signals

    executor = find_executor(on, workers, gpus_per_job, retries)
    with stop_signals(), JobView(console) as view:
        result = run(
            name, scale, seeds, out, device, workers, view, variants=variants, docs=docs, executor=executor, retries=retries
        )  # fmt: skip
    print(result)
    location = out if is_url(out) else result.folder
    print_line(f"results: {location}/results.md, {location}/{result.figure.name}")
