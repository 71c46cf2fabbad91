"""The commands `excite study list`, `excite study show`, `excite study judge`, `excite study plan` and `excite study run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from excite.cli.shared import GpusPerJob, On, Retries, Workers, add_group, console, print_line

study_app = add_group("study", "List, show and run the experiments of the papers, or your own.")


Reference = Annotated[
    str,
    typer.Argument(
        help="Name of a study from `excite study list`, paper and figure such as persistency:6, or the path of a file that "
        "defines STUDY."
    ),
]


StoredNumbers = Annotated[
    Path | None,
    typer.Option(help="A numbers.json or its folder; by default in runs/studies, else docs/results/NAME.json."),
]
StoredScale = Annotated[str | None, typer.Option(help="Which scale in runs/studies; by default the largest.")]


@study_app.command("list", epilog="Example: excite study list persistency")
def study_list(
    paper: Annotated[
        str | None,
        typer.Argument(
            help="Only the studies of one paper: persistency, richness, reveals or invariances; beyond for those in none."
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="One line for each study, even if the terminal has fewer rows.")
    ] = False,
) -> None:
    """List the studies by paper and figure: what each asks, what it costs here, and its verdicts so far."""
    from excite.studies.find import all_studies
    from excite.studies.overview import list_lines

    studies, failed = all_studies()
    height = console.height - len(failed) if console.is_terminal and not every else None
    for line in list_lines(studies.values(), console.width, height, paper):
        print_line(line)
    for name, reason in failed.items():
        print_line(f"not listed: {name}: {reason}")


@study_app.command("show", epilog="Example: excite study show persistency:6")
def study_show(name: Reference) -> None:
    """Show a study: its claims and verdicts, variants, settings of each scale, and where its results are."""
    from excite.studies.find import find_study
    from excite.studies.overview import show_lines

    for line in show_lines(find_study(name), min(console.width, 120)):
        print_line(line)


@study_app.command("judge", epilog="Example: excite study judge persistency:6")
def study_judge(
    name: Reference,
    numbers: StoredNumbers = None,
    scale: StoredScale = None,
) -> None:
    """Judge the claims of a study again from its stored numbers; nothing is run."""
    from excite.studies.judging.numbers import judge_again

    judged = judge_again(name, numbers, scale)
    print_line(f"{judged.study.name}, scale {judged.scale}, numbers of {judged.file}")
    print_line(judged)


@study_app.command("plan", epilog="Example: excite study plan persistency:6")
def study_plan(
    name: Reference,
    numbers: StoredNumbers = None,
    scale: StoredScale = None,
    power: Annotated[float, typer.Option(help="Probability with which a claim is to be decided.")] = 0.8,
) -> None:
    """Say how many seeds each claim of a study needs, from its stored numbers; nothing is run."""
    from excite.studies.judging.plan import plan_seeds

    plan = plan_seeds(name, numbers, scale, power=power)
    print_line(f"{plan.study.name}, scale {plan.scale}, numbers of {plan.file}")
    print_line(plan)


@study_app.command("run", epilog="Example: excite study run margin-layers --scale quick --workers 2")
def study_run(
    name: Reference,
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
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0, help="Stop after about this time and print what is done; the same command continues. 0 only prints."
        ),
    ] = None,
    numbers: Annotated[
        Path | None,
        typer.Option(
            help="A numbers.json or published docs/results/NAME.json: training runs whose numbers it has, with the same settings, "
            "are not run again."
        ),
    ] = None,
    on: On = None,
    gpus_per_job: GpusPerJob = 0.0,
    retries: Retries = 1,
) -> None:
    """Run an experiment and judge its claims. Finished training runs are not repeated."""
    from excite.jobs.preload import preload

    preload(on, workers)
    from excite.jobs.executors import find_executor
    from excite.jobs.terminal import JobView
    from excite.runs.store import is_url
    from excite.studies.runner import OutOfTime, run
    from excite.train.stopping import stop_signals

    executor = find_executor(on, workers, gpus_per_job, retries)
    try:
        with stop_signals(), JobView(console) as view:
            result = run(
                name, scale, seeds, out, device, workers, view, variants=variants, docs=docs, executor=executor,
                retries=retries, seconds=seconds, numbers=numbers,
            )  # fmt: skip
    except OutOfTime as error:
        for job, state in error.states.items():
            print_line(f"{state:<24} {job}")
        raise
    print(result)
    location = out if is_url(out) else result.folder
    print_line(f"results: {location}/results.md, {location}/{result.figure.name}")
