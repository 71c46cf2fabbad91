"""The command line: `excite demo | study | sweep | train | margins | audit | trace | report | serve | repair | doctor | data`."""

from __future__ import annotations

import os
import shutil
import sys
import time
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from excite._version import __version__
from excite.errors import ExciteError, InputError, RunError

if TYPE_CHECKING:
    from excite.report import Report

app = typer.Typer(
    help="See how robust and how complex a network becomes while it trains, and train it to be robust.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Data sets: list them, fetch and verify them.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")
study_app = typer.Typer(
    help="Experiments of the papers: list them, run them.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(study_app, name="study")
# Names of runs may hold brackets and colons: nothing is markup unless it says so.
console = Console(highlight=False, soft_wrap=False, markup=False, emoji=False)
_ON = (
    "Who does the work: local (worker processes), ray (a cluster started here) or ray:ADDRESS; by default this process."
)
_GPUS = "GPUs for each training with --on local or --on ray; a part such as 0.25 shares one."
_RETRIES = "How often work is tried again whose process or machine was lost, or that failed unexpectedly."
_TRUST = "Also a run whose model is a module:factory: its code is imported and called."
_debug = False
_INTERRUPTED = 130


def main() -> None:
    """Run the command line; what a user can cause ends in one line and a non-zero exit status."""
    try:
        status = app(standalone_mode=False) or 0
        if status == _INTERRUPTED:  # how typer passes Ctrl-C on, depending on its version
            raise KeyboardInterrupt
        raise SystemExit(status)
    except (KeyboardInterrupt, typer.Abort):
        if os.environ.get("RANK", "0") != "0":  # of several processes the first one says it
            raise SystemExit(_INTERRUPTED) from None
        _fail("stopped; the same command continues where it was", _INTERRUPTED)
    except ExciteError as error:
        if type(error).__name__ == "OtherProcess":  # of several, the one that failed says why
            # torchrun ends all processes as soon as one has ended: not before the other one has printed its line.
            time.sleep(5)
            raise SystemExit(1) from None
        _fail(str(error), 1, error)
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # wrong usage: typer knows how to say it
            error.show()
            raise SystemExit(error.exit_code) from None
        _fail(f"unexpected {type(error).__name__}: {error} (`excite --debug …` shows the traceback)", 1, error)


def _fail(message: str, status: int, error: Exception | None = None) -> None:
    if _debug and error is not None:
        raise error
    print(f"excite: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(status)


def _version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit()


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    global _debug
    _debug = debug


Tell = Callable[[str, float, float], None]


@contextmanager
def _progress(one_bar: bool = False) -> Iterator[Tell]:
    """A bar for each phase (or one for all) that names the phase and says how much time is left."""
    columns = (
        TextColumn("{task.description:<34}", markup=False), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    bars: dict[str, Any] = {}
    with Progress(*columns, console=console) as progress:

        def tell(phase: str, done: float, total: float) -> None:
            key = "" if one_bar else phase
            if key not in bars:
                bars[key] = progress.add_task(phase, total=total)
            progress.update(bars[key], completed=done, total=total, description=phase)

        yield tell


@app.command(epilog="Example: excite demo --out runs/demo --seeds 8")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs and the report.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Splits and initial weights, each trained three ways.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each training; fewer for a quick look.")] = 60,
    workers: Annotated[int, typer.Option(min=1, help="Trainings side by side.")] = 2,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over instead of continuing runs in the folder.")
    ] = False,
    open_report: Annotated[bool, typer.Option("--open/--no-open", help="Open the report in a browser.")] = True,
) -> None:
    """Train one small network three ways on handwritten digits, compare margins, write the report."""
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
    shown = make_report([job.folder for job in jobs])
    path = shown.write(out / "report.html", "Three ways to train: margins on digits 8 and 9")
    _show(shown)
    console.print(f"report: {path}", soft_wrap=True)
    _open(path, open_report)


@app.command(epilog="Example: excite train config.toml --run runs/first")
def train(
    config: Annotated[Path, typer.Argument(help="TOML or JSON file.")],
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", "--folder", help="Run folder; by default runs/NAME-OF-THE-CONFIG. (torchrun has another --run.)"
        ),
    ] = None,
    margins: Annotated[bool, typer.Option("--margins/--no-margins", help="Measure margins at the end.")] = True,
) -> None:
    """Train from a config file. A run that is there already is continued from its last checkpoint.

    On several processes: torchrun --nproc-per-node 2 -m excite train CONFIG.
    """
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
        here = stack.enter_context(many_processes(settings.device))
        if not here.first:
            train_across(settings, folder)
            return
        tell = stack.enter_context(_progress())
        trained = train_across(settings, folder, progress=tell)
        assert trained is not None
        trained.close()
        here.destroy()  # what follows runs on this rank alone
        saved = load_model(folder, trust=True)  # `train_across` refuses a run of another config: this one is the user's
        if margins and saved.data.classes:
            measure(saved, progress=tell)
    _show(make_report([folder]))
    console.print(f"run: {folder}", soft_wrap=True)


@app.command(epilog="Example: excite margins runs/first --norm 2 --points 500")
def margins(
    checkpoint: Annotated[Path, typer.Argument(help="A run folder, or a checkpoint file in one.")],
    norm: Annotated[str, typer.Option(help="inf or 2.")] = "inf",
    points: Annotated[int | None, typer.Option(min=1, help="At most this many points of each part.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the search.")] = 100,
    layers: Annotated[
        list[str] | None,
        typer.Option(help="Where to perturb: input (default), all, or a layer's name; may be repeated."),
    ] = None,
    relative: Annotated[bool, typer.Option(help="With --layers: perturbations over the size of each signal.")] = False,
    figure: Annotated[Path | None, typer.Option(help="Write the curves to this image (png, svg or pdf).")] = None,
    trust: Annotated[bool, typer.Option("--trust", help=_TRUST)] = False,
) -> None:
    """Margin curve of a saved model on the data it was trained for, with the evidence that the search worked."""
    from excite.train.evaluate import load_model, measure, why_not_stored

    if figure is not None and figure.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"--figure: expected a name that ends in .png, .svg or .pdf; got {figure.name!r}")
    saved = load_model(checkpoint, trust=trust)
    why = why_not_stored(saved.run)
    if why is not None:
        console.print(f"the results will be printed, not stored: {why}", soft_wrap=True)
    with _progress() as tell:
        found = measure(
            saved, norm=norm, most=points, steps=steps, layers=_layers(layers), relative=relative, progress=tell,
            store=why is None,
        )  # fmt: skip
    for part, result in found.items():
        console.print(f"\n{'training' if part == 'train' else part} data", style="bold")
        console.print(str(result), soft_wrap=True)
    if len(found) == 2:
        console.print(f"\ngap between the curves: {found['train'].gap(found['test'])}", soft_wrap=True)
    if figure is not None:
        _draw(found, figure)
        console.print(f"figure: {figure}", soft_wrap=True)
    where = f"stored in: {saved.run / 'artifacts'}" if why is None else f"not stored: {why}"
    console.print(where, soft_wrap=True)


@app.command(epilog="Example: excite audit runs/first --out audit.html")
def audit(
    checkpoint: Annotated[Path, typer.Argument(help="A run folder, or a checkpoint file in one.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("audit.html"),
    points: Annotated[int, typer.Option(min=1, help="At most this many points of each part.")] = 1000,
    units: Annotated[bool, typer.Option("--units/--no-units", help="Judge every unit of every layer.")] = True,
    margins: Annotated[
        bool, typer.Option("--margins/--no-margins", help="Show margins; measure them if the run has none.")
    ] = True,
    trust: Annotated[bool, typer.Option("--trust", help=_TRUST)] = False,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """One page on a saved model: richness of its layers, deficient units, theorems, Lipschitz constants, margins."""
    from excite.report.audit import audit as audit_model
    from excite.train.evaluate import load_model

    saved = load_model(checkpoint, trust=trust)
    with _progress(one_bar=True) as tell:
        found = audit_model(saved, points=points, units=units, with_margins=margins, progress=tell)
    path = found.write(out)
    console.print(str(found), markup=False, soft_wrap=True)
    console.print(f"page: {path}", soft_wrap=True)
    try:
        found.keep(saved.run)
    except RunError as error:
        console.print(f"not stored in the run: {error}", soft_wrap=True)
    _open(path, open_page)


@app.command(epilog="Example: excite trace torch.nn:Linear --option in_features=5 --option out_features=1 --shape 5")
def trace(
    model: Annotated[
        str, typer.Argument(help="MODULE:FACTORY, a function or class that makes a model; or a built-in name.")
    ],
    shape: Annotated[str, typer.Option(help="Shape of one input, such as 3x32x32.")],
    option: Annotated[list[str] | None, typer.Option(help="name=value for the factory; may be repeated.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Integer inputs below this number instead of floats.")
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="Key or index of the output, if the model returns several.")
    ] = None,
) -> None:
    """Print a model's affine layers, how their channels connect, and what training conserves."""
    import torch

    from excite.train.models.factories import make_model
    from excite.wiring import trace as trace_model

    sizes = _shape(shape)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, *sizes, generator=generator)
    if tokens is not None:
        x = torch.randint(tokens, (2, *sizes), generator=generator)
    built = make_model(model, **_factory_options(option or []))
    picked = int(output) if output is not None and output.lstrip("-").isdigit() else output
    print(trace_model(built, x, output=picked))


@app.command(epilog="Example: excite report runs/demo --out report.html")
def report(
    runs: Annotated[list[str], typer.Argument(help="Run folders, or folders of runs; URLs too.")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its title.")] = "Excite report",
    open_report: Annotated[bool, typer.Option("--open/--no-open", help="Open it in a browser.")] = False,
) -> None:
    """One self-contained HTML file on one or more runs: works offline, opens from disk."""
    from excite.report import make_report

    shown = make_report(runs)
    path = shown.write(out, title)
    _show(shown)
    console.print(f"report: {path}", soft_wrap=True)
    _open(path, open_report)


@app.command(epilog="Example: excite serve runs")
def serve(
    runs: Annotated[str, typer.Argument(help="A folder of runs, or one run; a URL too.")] = "runs",
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but this machine's own needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8765,
    token: Annotated[str | None, typer.Option(help="What visitors must bring; made by itself where needed.")] = None,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """The live page: runs while they train, with curves that grow, compared on the same axes. Ctrl-C ends it."""
    from excite.report.live import serve as serve_runs

    def announce(address: str) -> None:
        console.print(f"open {address} (Ctrl-C ends it)", soft_wrap=True, markup=False)
        if open_page:
            webbrowser.open(address)

    serve_runs(runs, host, port, token, announce)


@app.command(epilog="Example: excite repair runs/first --dry-run")
def repair(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check, change nothing.")] = False,
) -> None:
    """Check a run folder and mend what can be mended. What is replaced is kept in the run; exit status 1: something is wrong still."""
    from excite.runs import repair as repair_run

    result = repair_run(run, dry_run=dry_run)
    print(result)
    if not result.whole:
        raise typer.Exit(1)


@app.command(epilog="Example: excite doctor")
def doctor() -> None:
    """Print versions, devices, extras and data on this machine, and what does not fit. Exit status 1: something does not."""
    from excite.cli.diagnosis import diagnose

    found = diagnose()
    print(found)
    if found.problems:
        raise typer.Exit(1)


@study_app.command("list", epilog="Example: excite study list")
def study_list() -> None:
    """The studies, and the claims each of them tests."""
    from excite.studies import STUDIES

    shown = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    for heading in ("name", "claims", "scales"):
        shown.add_column(heading, overflow="fold")
    for name, study in STUDIES.items():
        claims = [f"• {claim.text}" for claim in study.claims(study.scales["quick"])]
        shown.add_row(name, "\n".join([f"{study.title}: {study.figure}", *claims]), ", ".join(study.scales))
    console.print(shown, markup=False)


@study_app.command("run", epilog="Example: excite study run margin-layers --scale quick --workers 2")
def study_run(
    name: Annotated[str, typer.Argument(help="A name from `excite study list`.")],
    scale: Annotated[
        str, typer.Option(help="quick (minutes on two cores) or paper (the authors' settings).")
    ] = "quick",
    seeds: Annotated[int | None, typer.Option(min=1, help="Trainings of each arm; by default the scale's own.")] = None,
    out: Annotated[
        str | None, typer.Option(help="Folder or URL for the results; by default runs/studies/NAME-SCALE.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default a GPU for scale paper.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Trainings side by side on the CPU.")] = 2,
    arms: Annotated[
        str | None, typer.Option(help="figure: the papers' curves; all: the other arms too (default for paper).")
    ] = None,
    docs: Annotated[Path | None, typer.Option(help="Also write the results page and its images here.")] = None,
    on: Annotated[str | None, typer.Option(help=_ON)] = None,
    gpus_per_task: Annotated[float, typer.Option(min=0, help=_GPUS)] = 0.0,
    retries: Annotated[int, typer.Option(min=0, help=_RETRIES)] = 1,
) -> None:
    """Run an experiment of the papers and judge its claims. What is finished already is not done again."""
    from excite.jobs.preload import preload

    preload(on, workers)
    from excite.jobs.executors import find_executor
    from excite.jobs.terminal import JobView
    from excite.runs.store import is_url
    from excite.studies import run
    from excite.train.stopping import stop_signals

    executor = find_executor(on, workers, gpus_per_task, retries)
    with stop_signals(), JobView(console) as view:
        result = run(
            name,
            scale,
            seeds,
            out,
            device,
            workers,
            variants=arms,
            docs=docs,
            on_progress=view,
            executor=executor,
            retries=retries,
        )
    print(result)
    where = out if is_url(out) else result.folder
    console.print(f"results: {where}/results.md, {where}/{result.figure.name}", soft_wrap=True)


@app.command(epilog="Example: excite sweep sweep.toml --on local --workers 4")
def sweep(
    config: Annotated[Path, typer.Argument(help="TOML or JSON file: a training config with a table [sweep].")],
    out: Annotated[
        str | None, typer.Option(help="Folder or URL for the runs; by default runs/sweeps/NAME-OF-THE-CONFIG.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Trainings side by side on the CPU.")] = 2,
    on: Annotated[str | None, typer.Option(help=_ON)] = None,
    gpus_per_task: Annotated[float, typer.Option(min=0, help=_GPUS)] = 0.0,
    retries: Annotated[int, typer.Option(min=0, help=_RETRIES)] = 1,
) -> None:
    """Train every combination of a config's lists and ranges, and compare. What is finished already is not done again."""
    from excite.jobs.preload import preload

    preload(on, workers)
    from excite.jobs.executors import find_executor
    from excite.jobs.sweep import read_sweep, run_sweep
    from excite.jobs.terminal import JobView
    from excite.train.stopping import stop_signals

    planned = read_sweep(config, out or Path("runs/sweeps") / config.stem)
    executor = find_executor(on, workers, gpus_per_task, retries)
    with stop_signals(), JobView(console) as view:
        result = run_sweep(planned, workers, on_progress=view, executor=executor, retries=retries)
    print(result)
    console.print(f"results: {planned.workspace}/sweep.json", soft_wrap=True)
    if result.failed is not None:
        _fail(result.failed, 1)


@data_app.command("list", epilog="Example: excite data list")
def data_list() -> None:
    """The data sets Excite knows, and where downloads are kept."""
    from excite.data import BUILT_IN, DOWNLOADED, cache_folder

    table = Table(box=None, pad_edge=False)
    for heading in ("name", "where it comes from"):
        table.add_column(heading)
    for name in BUILT_IN:
        table.add_row(name, "built in")
    for name in DOWNLOADED:
        table.add_row(name, f"excite data fetch {name}")
    console.print(table)
    console.print(f"cache: {cache_folder()} (EXCITE_DATA names another)", soft_wrap=True)


@data_app.command("fetch", epilog="Example: excite data fetch cifar10")
def data_fetch(name: Annotated[str, typer.Argument(help="cifar10 or mnist.")]) -> None:
    """Download, verify and cache a data set. Files that are there already with the right hash are used as they are."""
    from excite.data import fetch

    with _progress() as tell:
        path = fetch(name, progress=tell)
    console.print(f"{name}: {path}", soft_wrap=True)


def _show(report: Report) -> None:
    """The final table, one row for each way of training, and what it means."""
    shown = Table(box=None, pad_edge=False, collapse_padding=True)
    headings = {
        "arm": "trained", "runs": "runs", "accuracy test": "test accuracy", "margin train": "median margin, train",
        "margin test": "test", "gap": "gap of the curves",
    }  # fmt: skip
    for key, heading in headings.items():
        shown.add_column(heading, justify="left" if key == "arm" else "right", overflow="fold")
    for row in report.rows:
        shown.add_row(*(row[key] for key in headings))
    console.print(shown)
    for sentence in report.sentences:
        console.print(f"• {sentence}", markup=False)


def _draw(found: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from excite._core.files import writing

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for part, result in found.items():
        result.plot(ax=axes, label=f"{'training' if part == 'train' else part} data")
    axes.legend()
    with writing(path):
        figure.savefig(path, dpi=150)


def _open(path: Path, wanted: bool) -> None:
    if wanted and sys.stdout.isatty():
        webbrowser.open(path.resolve().as_uri())


def _layers(names: list[str] | None) -> str | list[str]:
    if not names:
        return "input"
    return names[0] if names in (["input"], ["all"]) else names


def _shape(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.replace("×", "x").replace(",", "x").lower().split("x"))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise InputError(f"--shape: expected sizes such as 3x32x32; got {text!r}")
    return sizes


def _factory_options(pairs: list[str]) -> dict[str, Any]:
    import json

    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"--option: expected name=value; got {pair!r}")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


if __name__ == "__main__":
    main()
