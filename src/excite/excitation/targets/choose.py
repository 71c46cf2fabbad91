"""The target that the arguments `targets`, `classes`, `threshold` and `loss` of the training methods stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from excite._core.checks import check_choice, check_count, shown
from excite.errors import InputError
from excite.excitation.targets.binary import Binary, check_loss
from excite.excitation.targets.codes import Codes
from excite.excitation.targets.target import Loss
from excite.excitation.targets.tokens import Tokens
from excite.excitation.targets.values import Values

TARGETS = ("labels", "values", "tokens", "next-token")


def choose_target(classes: int | None, threshold: float | None, loss: Loss) -> Binary | Codes:
    """`Binary` without classes, `Codes` with them."""
    if classes is None:
        return Binary(threshold, loss)
    if threshold is not None:
        raise InputError(
            f"threshold: classes={classes} decide for the nearest code; got {shown(threshold)}: leave it out, or leave out classes="
        )
    return Codes(classes, loss)


def values_target(classes: object, hierarchy: object, threshold: object, loss: Loss) -> Values:
    """`Values`; settings of classifiers beside it are refused."""
    for name, passed in (("classes", classes), ("hierarchy", hierarchy), ("threshold", threshold)):
        if passed is not None:
            raise InputError(f"{name}: targets='values' is a regression; got {shown(passed)}: leave one of the two out")
    if check_loss(loss) != "squared":
        raise InputError("loss: targets='values' has the squared error only; got 'cross-entropy'")
    return Values()


def tokens_target(
    targets: str, tokens: object, ignore_index: object, loss: object, unused_settings: Mapping[str, object]
) -> Tokens:
    """`Tokens`; settings of other targets beside it (`unused_settings`) are refused."""
    for name, other in unused_settings.items():
        if other is not None:
            raise InputError(
                f"{name}: targets={targets!r} has a label for each token; got {shown(other)}: leave one of the two out"
            )
    if loss != "cross-entropy":
        raise InputError(
            f"loss: targets={targets!r} has the cross-entropy only; got {shown(loss)}: give loss='cross-entropy'"
        )
    perturbed: Any = check_choice(tokens, "tokens", ("all", "prompt"))
    return Tokens(targets == "next-token", check_count(ignore_index, "ignore_index", minimum=-(2**31)), perturbed)
