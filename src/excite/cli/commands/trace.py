"""The command `excite trace`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from excite.cli.shared import app
from excite.errors import InputError


@app.command(
    short_help="Print a model's layers and what training conserves.",
    epilog="Example: excite trace torch.nn:Linear --option in_features=5 --option out_features=1 --shape 5",
)
def trace(
    model: Annotated[
        str, typer.Argument(help="MODULE:FACTORY, a function or class that returns a model; or a built-in name.")
    ],
    shape: Annotated[str, typer.Option(help="Shape of one input, such as 3x32x32.")],
    option: Annotated[list[str] | None, typer.Option(help="name=value for the factory; may be repeated.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Use integer inputs below this number instead of floats.")
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="Key or index of the output, if the model returns several.")
    ] = None,
) -> None:
    """Print a model's affine layers, how their channels connect, and what training conserves."""
    import torch

    from excite.train.models.factories import make_model
    from excite.wiring import trace as trace_model

    sizes = _parse_shape(shape)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, *sizes, generator=generator)
    if tokens is not None:
        x = torch.randint(tokens, (2, *sizes), generator=generator)
    built = make_model(model, **_parse_options(option or []))
    key = int(output) if output is not None and output.lstrip("-").isdigit() else output
    print(trace_model(built, x, output=key))


def _parse_shape(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(size) for size in text.replace("×", "x").replace(",", "x").lower().split("x"))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise InputError(f"--shape: expected sizes such as 3x32x32; got {text!r}")
    return sizes


def _parse_options(pairs: list[str]) -> dict[str, Any]:
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
