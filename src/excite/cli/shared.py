"""Shared by several commands: the application and its console, common options, progress bars, the table of results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from excite.errors import InputError

if TYPE_CHECKING:
    from excite.margin import Margins
    from excite.report import Report
    from excite.report.verdict import Headline
    from excite.train.evaluate import SavedModel

app = typer.Typer(
    help="See how robust and how complex a network becomes while it trains, and train it to be robust.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Names of runs may contain brackets and colons: they are not markup.
console = Console(highlight=False, soft_wrap=False, markup=False, emoji=False)

Trust = Annotated[
    bool, typer.Option("--trust", help="Accept a run whose model is a MODULE:FACTORY, which is imported and called.")
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODULE:FACTORY",
        help="Build the model by this function or class, which is imported and called, or by the name of a built-in model.",
    ),
]
ModelOptions = Annotated[
    str | None,
    typer.Option("--options", metavar="JSON", help="Keyword arguments of --model, such as '{\"width\": 64}'."),
]
DataName = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="NAME",
        help="A dataset, or a .safetensors or .npz file with x_train, y_train, x_test and y_test; by default the run's own data.",
    ),
]
Normalize = Annotated[
    str | None,
    typer.Option(
        metavar="MEAN/STD",
        help="Normalization of the data per channel, such as 0.5,0.5,0.5/0.2,0.2,0.2; margins are then in pixels.",
    ),
]
InputBounds = Annotated[
    tuple[float, float] | None, typer.Option("--bounds", help="Smallest and largest value of an input, such as 0 1.")
]
Workers = Annotated[int, typer.Option(min=1, help="Number of training runs in parallel on the CPU.")]
On = Annotated[
    str | None,
    typer.Option(
        help="Where jobs run: local (worker processes), ray (a cluster started on this machine) or ray:ADDRESS; "
        "by default this process and, on the CPU, its worker processes."
    ),
]
GpusPerJob = Annotated[
    float, typer.Option(min=0, help="GPUs per job with --on local or --on ray; a fraction such as 0.25 shares one.")
]
Retries = Annotated[
    int, typer.Option(min=0, help="How often a job is restarted after a lost process or an unexpected error.")
]


def add_group(name: str, help: str) -> typer.Typer:
    """Adds a group of commands, such as `excite data list` and `excite data fetch`."""
    group = typer.Typer(help=help, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name=name)
    return group


def load_saved(
    path: Path,
    model: str | None,
    options: str | None,
    data: str | None,
    normalize: str | None,
    bounds: tuple[float, float] | None,
    trust: bool,
) -> SavedModel:
    """The model that the arguments and options of a command describe."""
    from excite.train.evaluate import load_model

    return load_model(
        path,
        model=model,
        options=None if options is None else parse_options(options),
        data=data,
        normalize=None if normalize is None else parse_normalize(normalize),
        bounds=bounds,
        trust=trust,
    )


def parse_options(text: str) -> dict[str, Any]:
    """The keyword arguments in the text of --options."""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"--options: expected JSON, such as '{{\"width\": 64}}'; got {text!r} ({error})") from error
    if not isinstance(options, dict):
        raise InputError(f"--options: expected keyword arguments, such as '{{\"width\": 64}}'; got {text!r}")
    return options


def parse_normalize(text: str) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel in the text of --normalize."""
    try:
        mean, std = ([float(number) for number in numbers.split(",")] for numbers in text.split("/"))
    except ValueError as error:
        raise InputError(f"--normalize: expected MEAN/STD, such as 0.5,0.5,0.5/0.2,0.2,0.2; got {text!r}") from error
    return mean, std


def print_line(text: object) -> None:
    """Prints a line that is not wrapped, so that paths in it can be copied."""
    console.print(str(text), soft_wrap=True)


@contextmanager
def progress_bars(single: bool = False) -> Iterator[Callable[[str, float, float], None]]:
    """Shows progress bars.

    Args:
        single: One bar for all phases instead of one for each.

    Yields:
        A callback (phase, done, total) that updates them.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<34}", markup=False), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    bars: dict[str, Any] = {}
    with Progress(*columns, console=console) as progress:

        def update(phase: str, done: float, total: float) -> None:
            key = "" if single else phase
            if key not in bars:
                bars[key] = progress.add_task(phase, total=total)
            progress.update(bars[key], completed=done, total=total, description=phase)

        yield update


def print_headline(line: Headline) -> None:
    """Prints the first line of a page, in red for a run that diverged."""
    style = {"diverged": "bold red", "bad": "bold red", "warning": "bold yellow", "good": "bold green"}.get(
        line.kind, "bold"
    )
    console.print(line.text, style=style, markup=False, highlight=False)
    console.print(f"Next: {line.action}\n", markup=False, highlight=False)


def print_verdict(results: Mapping[str, Margins], run: str, measurable: bool = True) -> None:
    """Prints the first line about margins at the input, as the pages show it; nothing about hidden layers."""
    from excite.report.verdict import headline
    from excite.report.verdict.outcome import from_margins

    if all(result.layers == "input" for result in results.values()):
        print_headline(headline([from_margins(results, measurable=measurable)], name=run))


def print_summary(report: Report) -> None:
    """Prints the first line of a report, its table, one row per variant, and its findings."""
    from rich.table import Table

    print_headline(report.headline)
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    headings = {
        "arm": "trained", "runs": "runs", "accuracy test": "test accuracy", "margin train": "median margin, train",
        "margin test": "test", "gap": "gap of the curves",
    }  # fmt: skip
    for key, heading in headings.items():
        table.add_column(heading, justify="left" if key == "arm" else "right", overflow="fold")
    for row in report.rows:
        table.add_row(*(row[key] for key in headings))
    console.print(table)
    for sentence in report.sentences:
        console.print(f"• {sentence}")


def open_in_browser(path: Path) -> None:
    """Opens a file in a browser if a person is at the terminal."""
    import webbrowser

    if sys.stdout.isatty():
        webbrowser.open(path.resolve().as_uri())
