"""The command `excite margins`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from excite.cli.shared import (
    DataName,
    InputBounds,
    ModelName,
    ModelOptions,
    Normalize,
    Trust,
    app,
    console,
    load_saved,
    print_line,
    print_verdict,
    progress_bars,
)
from excite.errors import InputError

if TYPE_CHECKING:
    from excite.margin import Margins
    from excite.margin.inputs import Certificate


@app.command(
    short_help="Measure the margins of a saved model.",
    epilog="Example: excite margins runs/first --norm 2 --points 500",
)
def margins(
    checkpoint: Annotated[Path, typer.Argument(help="A run folder, a checkpoint in one, or a file of weights.")],
    norm: Annotated[str, typer.Option(help="inf, 2 or 1.")] = "inf",
    points: Annotated[int | None, typer.Option(min=1, help="Maximal number of training and of test points.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the search.")] = 100,
    layers: Annotated[
        list[str] | None,
        typer.Option(help="Where to perturb: input (default), all, or the name of a layer; may be repeated."),
    ] = None,
    relative: Annotated[
        bool, typer.Option(help="With --layers: divide perturbations by the norm of each layer's input.")
    ] = False,
    certify: Annotated[
        str | None, typer.Option(help="Lower bounds: lipschitz (where known), interval, linear, exact or none.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Write the curves to this image (png, svg or pdf).")] = None,
    model: ModelName = None,
    options: ModelOptions = None,
    data: DataName = None,
    normalize: Normalize = None,
    bounds: InputBounds = None,
    trust: Trust = False,
) -> None:
    """Measure the margins of a saved model on its training and test data, with evidence that the search worked.

    For a run without weights, prints the margins measured at the end of its training.
    """
    from excite.margin import SearchOptions
    from excite.train.evaluate import measure, more_points, why_not_stored
    from excite.train.models.loading import NoWeights

    if figure is not None and figure.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"--figure: expected a name that ends in .png, .svg or .pdf; got {figure.name!r}")
    try:
        saved = load_saved(checkpoint, model, options, data, normalize, bounds, trust)
    except NoWeights as error:
        if (layers, relative, certify, points) != (None, False, None, None) or not (
            stored := _stored(checkpoint, norm)
        ):
            raise
        _print_margins(stored, checkpoint, figure, measurable=False)
        print_line(f"measured at the end of the training; to measure more: {error}")
        return
    reason = why_not_stored(saved)
    if reason is not None:
        print_line(f"the results will be printed, not stored: {reason}")
    with progress_bars() as progress:
        results = measure(
            saved, norm=norm, max_points=points, options=SearchOptions(steps=steps, certify=_parse_certify(certify)), layers=_parse_layers(layers), relative=relative, progress=progress,
            store=reason is None,
        )  # fmt: skip
    _print_margins(results, checkpoint, figure)
    if reason is None and (more := more_points(saved, results)):
        print_line(f"not stored: the run has margins of more points ({more}); without --points all are measured")
    else:
        print_line(f"stored in: {saved.folder / 'artifacts'}" if reason is None else f"not stored: {reason}")


def _stored(run: Path, norm: str) -> dict[str, Margins]:
    """The margins in this norm that a run holds, by part."""
    from excite._core.checks import parse_norm
    from excite.report.collect import stored_margins

    return stored_margins(run, None, 0, parse_norm(norm))


def _print_margins(results: dict[str, Margins], run: Path, figure: Path | None, measurable: bool = True) -> None:
    print_verdict(results, str(run), measurable)
    for split, result in results.items():
        console.print(f"\n{_label(split)}", style="bold")
        print_line(result)
        if result.layers == "input":
            print_line(_unit_line(result))
    if len(results) == 2:
        print_line(f"\ngap between the curves: {results['train'].gap(results['test'])}")
    if figure is not None:
        _save_figure(results, figure)
        print_line(f"figure: {figure}")


def _parse_certify(name: str | None) -> bool | Certificate:
    return {None: True, "none": False}.get(name, name)  # type: ignore[arg-type,return-value]  # SearchOptions refuses other names


def _parse_layers(names: list[str] | None) -> str | list[str]:
    if not names:
        return "input"
    return names[0] if names in (["input"], ["all"]) else names


def _unit_line(result: Margins) -> str:
    """The unit of the margins, and the median in it."""
    from excite.report.verdict.units import describe

    if result.unit is None:
        return "unit: that of the inputs, whose range is not known: --bounds LOW HIGH gives it"
    what = f"{'pixels' if result.unit.pixels else 'inputs'} from {result.unit.low:g} to {result.unit.high:g}"
    return f"unit: {what}; median: {describe(result.median, result.norm, result.unit)}"


def _label(split: str) -> str:
    return f"{'training' if split == 'train' else split} data"


def _save_figure(results: dict[str, Margins], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from excite._core.files import writing

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for split, result in results.items():
        result.plot(ax=axes, label=_label(split))
    axes.legend()
    with writing(path):
        figure.savefig(path, dpi=150)
