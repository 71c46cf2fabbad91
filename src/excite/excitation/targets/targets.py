"""What the outputs of a model mean: which labels there are, how far an output is from its label, what is decided.

One class per reading: `Binary` (one output and a threshold), `Codes` (many classes, equidistant codes), `Values` (a
regression), `Tokens` (a class for each token of a sequence); the hierarchy of binary classifiers has its own file. A target sees outputs and labels only: it runs no model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from excite._core.background import DeferredChecks
from excite._core.calls import Batch
from excite._core.checks import check_choice, check_count, check_dense, check_number, shown
from excite._core.preserve import capturing
from excite.errors import InputError, ModelError
from excite.excitation.codes import codes, nearest
from excite.excitation.direction import any_direction, wide

Loss = Literal["squared", "cross-entropy"]


class Target(ABC):
    """A reading of the outputs. `errors` is per sample: the loss at radius 0 is its mean over the batch."""

    @abstractmethod
    def outputs(self, returned: Tensor, batch: int) -> Tensor:
        """What the model returned for `batch` samples as (B,) or (B, k); any other shape is refused."""

    @abstractmethod
    def labels(self, y: object, batch: int, later: DeferredChecks | None = None) -> Tensor:
        """The labels as (B,); others than this target knows are refused, with `later` without waiting for a GPU."""

    @abstractmethod
    def errors(self, output: Tensor, labels: Tensor) -> Tensor:
        """The loss of each sample, (B,)."""

    @abstractmethod
    def decide(self, output: Tensor) -> Tensor:
        """Labels, (B,)."""

    def start(self, output: Tensor) -> Tensor:
        """Where the search for the direction v begins, (B, k), of unit length."""
        return any_direction(output)

    @abstractmethod
    def trivial(self, labels: Tensor) -> Tensor:
        """The mean error of the best constant output on these labels: what a network that learned nothing has."""

    def mean_error(self, output: Tensor, labels: Tensor) -> Tensor:
        """The loss at radius 0, a scalar: the mean of the errors over the batch."""
        return self.errors(output, labels).mean()

    def mean_loss(self, losses: Tensor, low: Tensor, high: Tensor, labels: Tensor) -> Tensor:
        """The loss, a scalar: the mean of `losses(low, high, labels)` over the batch."""
        return losses.mean()

    def right(self, low: Tensor, high: Tensor, labels: Tensor) -> Tensor:
        """Whether each sample is decided rightly in the middle of its two extremes, (B,) of bool."""
        return self.decide((low + high) / 2) == labels

    def searches(self, x: Batch, labels: Tensor | None) -> tuple[Batch, Tensor | None]:
        """What is searched for the batch x: samples, and the direction v of each; None leaves the direction to the search."""
        return x, None

    def losses(self, low: Tensor, high: Tensor, labels: Tensor) -> Tensor:
        """½ error(f(x; d1), y) + ½ error(f(x; d2), y) of each sample, (B,), from the outputs at the extremes of `searches`."""
        return 0.5 * (self.errors(high, labels) + self.errors(low, labels))

    def extremes(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) or (B, k) each, from the outputs at the extremes of `searches(x, None)`."""
        return low, high


class Binary(Target):
    """One output f, labels 0 and 1, class 1 where f > threshold. Errors: (f − y)², or the binary cross-entropy of logits."""

    def __init__(self, threshold: float | None = None, loss: Loss = "squared"):
        self.loss_name = check_loss(loss)
        self.threshold = check_threshold(threshold, self.loss_name)

    def outputs(self, returned: Tensor, batch: int) -> Tensor:
        """Returns the model's outputs as (B,)."""
        return scalar(returned, batch)

    def labels(self, y: object, batch: int, later: DeferredChecks | None = None) -> Tensor:
        """Returns the labels (B,), each 0 or 1."""
        y = label_tensor(y, batch, "0 and 1")
        if y.is_complex():
            raise InputError(f"labels: expected real numbers, 0 and 1; got {y.dtype}")
        return y if y.dtype == torch.bool or (y.is_cuda and capturing()) else accepted(y, 2, _not_binary, later)

    def errors(self, output: Tensor, labels: Tensor) -> Tensor:
        """Loss per sample, (B,)."""
        return binary_errors(output, labels, self.loss_name)

    def decide(self, output: Tensor) -> Tensor:
        """Returns the class of each output, (B,): 1 above the threshold."""
        return (output > self.threshold).long()

    def confusion(self, output: Tensor, labels: Tensor) -> Tensor:
        """How far the output is on the wrong side of the threshold, (B,): positive where the decision is wrong."""
        return (self.threshold - output) * (2 * labels.to(output.dtype) - 1)

    def trivial(self, labels: Tensor) -> Tensor:
        """Returns the loss of the best constant output."""
        if self.loss_name == "cross-entropy":
            return entropy(labels.long(), 2)
        return labels.float().var(correction=0)

    def __repr__(self) -> str:
        return f"threshold={self.threshold}, loss={self.loss_name!r}"


class Values(Target):
    """Real-valued targets y, one for each output: errors ‖f − y‖², the sum over outputs (section 5.2)."""

    def outputs(self, returned: Tensor, batch: int) -> Tensor:
        """Returns the model's outputs as (B,), or (B, k) for several."""
        if returned.shape == (batch, 1):
            return returned.squeeze(1)
        if returned.shape == (batch,) or (returned.dim() == 2 and len(returned) == batch and returned.shape[1]):
            return returned
        raise ModelError(
            f"targets='values' needs outputs ({batch},) or ({batch}, k); the model returned {tuple(returned.shape)}: "
            "flatten them in the model, or pick some with output="
        )

    def labels(self, y: object, batch: int, later: DeferredChecks | None = None) -> Tensor:
        """Returns the targets as (B,) or (B, k)."""
        if not isinstance(y, Tensor):
            raise InputError(f"targets: expected a tensor of floating-point numbers; got {type(y).__name__}")
        if not y.is_floating_point():
            raise InputError(
                f"targets: targets='values' expects floating-point numbers; got {y.dtype}: use y.float(), or leave out "
                "targets= for classes"
            )
        if y.dim() not in (1, 2) or len(y) != batch or not y.numel():
            raise InputError(
                f"targets: expected shape ({batch},) or ({batch}, k) for {batch} inputs; got {tuple(y.shape)}"
            )
        y = check_dense(y, "targets").detach()
        if not (y.is_cuda and capturing()):
            extremes = torch.stack(torch.aminmax(y))
            (later or DeferredChecks("loss")).add(extremes, _not_finite)
        return y.squeeze(1) if y.shape == (batch, 1) else y

    def errors(self, output: Tensor, labels: Tensor) -> Tensor:
        """Loss per sample, (B,)."""
        if output.shape != labels.shape:
            raise InputError(f"targets: expected one for each output, {tuple(output.shape)}; got {tuple(labels.shape)}")
        squares = (output - labels.to(output.dtype)).square()
        return squares if squares.dim() == 1 else squares.sum(1)

    def decide(self, output: Tensor) -> Tensor:
        """Returns the outputs as they are."""
        return output

    def trivial(self, labels: Tensor) -> Tensor:
        """Returns the variance of the targets, summed over outputs: the loss of the best constant output."""
        return labels.float().var(0, correction=0).sum()

    def __repr__(self) -> str:
        return "targets='values'"


class Codes(Target):
    """m classes by m outputs, or by m − 1: errors ‖f − z_y‖² from the code of the label, decision for the nearest code.

    With the cross-entropy as loss the m outputs are logits; they decide by their argmax either way.
    """

    def __init__(self, classes: int, loss: Loss = "squared"):
        self.classes = check_classes(classes)
        self.loss_name = check_loss(loss)
        self._made: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def outputs(self, returned: Tensor, batch: int) -> Tensor:
        """Returns the model's outputs as (B, m), or (B, m − 1) for the squared error."""
        m = self.classes
        if m == 2 and returned.shape == (batch,):
            returned = returned[:, None]
        allowed = (m,) if self.loss_name == "cross-entropy" else (m, m - 1)
        if returned.dim() == 2 and returned.shape[0] == batch and returned.shape[1] in allowed:
            return returned
        shapes = " or ".join(f"({batch}, {k})" for k in allowed)
        raise ModelError(
            f"classes={m} with the {self.loss_name} loss needs outputs of shape {shapes}; the model returned "
            f"{tuple(returned.shape)}: give it {m} outputs, or pick them with output="
        )

    def labels(self, y: object, batch: int, later: DeferredChecks | None = None) -> Tensor:
        """Returns the labels as class indices (B,)."""
        return class_labels(y, batch, self.classes, later)

    def errors(self, output: Tensor, labels: Tensor) -> Tensor:
        """Loss per sample, (B,): cross-entropy, or the squared distance from the code of its class."""
        if self.loss_name == "cross-entropy":
            return F.cross_entropy(output, labels, reduction="none")
        return (output - self.points(output)[labels]).square().sum(1)

    def decide(self, output: Tensor) -> Tensor:
        """Returns the class whose code is nearest to each output, (B,)."""
        return nearest(output, self.points(output))

    def confusion(self, output: Tensor, labels: Tensor) -> Tensor:
        """How far the best other class is above the label's, (B,): positive where the decision is wrong."""
        scores = output @ self.points(output).T  # codes are equally long: the nearest has the largest product
        own = F.one_hot(labels, self.classes).bool()
        return scores.masked_fill(own, -math.inf).amax(1) - scores.gather(1, labels[:, None]).squeeze(1)

    def trivial(self, labels: Tensor) -> Tensor:
        """Returns the loss of the best constant output."""
        if self.loss_name == "cross-entropy":
            return entropy(labels, self.classes)
        return (
            1 - shares(labels, self.classes).square().sum()
        ) / 2  # half the mean squared distance of two codes drawn at random

    def start(self, output: Tensor) -> Tensor:
        """From the second nearest code to the nearest: along the decision at stake, and of length 1 as it is."""
        output = output.to(wide(output))
        points = self.points(output)
        first, second = (output @ points.T).topk(2, 1).indices.unbind(1)
        return points[first] - points[second]

    def points(self, output: Tensor) -> Tensor:
        """The codes on the device and in the precision of `output`; made once, not copied there at every step."""
        key = (output.shape[1], output.dtype, output.device)
        if key not in self._made:
            self._made[key] = codes(self.classes, output.shape[1]).to(output)
        return self._made[key]

    def __repr__(self) -> str:
        return f"classes={self.classes}, loss={self.loss_name!r}"


class Tokens(Target):
    """A class for each token: outputs (B, T, V) are logits, labels (B, T) are tokens, or `ignore_index` where none is counted.

    The loss is the mean of −log p over all counted tokens of the batch, as in `F.cross_entropy`. `errors` has the mean over the
    counted tokens of each sequence. With `shift` the output at position t is compared with the label at t + 1, as the causal
    language models of Transformers do.
    """

    def __init__(self, shift: bool = False, ignore_index: int = -100, perturbed: Literal["all", "prompt"] = "all"):
        self.shift, self.ignore_index, self.perturbed = shift, ignore_index, perturbed

    def outputs(self, returned: Tensor, batch: int) -> Tensor:
        """Returns the logits, (B, T, V)."""
        if returned.dim() == 3 and len(returned) == batch:
            return returned
        raise ModelError(
            f"targets={self._name!r} needs logits of shape ({batch}, tokens, vocabulary); the model returned {tuple(returned.shape)}: "
            "pick them with output="
        )

    def labels(self, y: object, batch: int, later: DeferredChecks | None = None) -> Tensor:
        """Returns the labels, (B, T)."""
        if not isinstance(y, Tensor) or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            dtype = y.dtype if isinstance(y, Tensor) else type(y).__name__
            raise InputError(f"labels: targets={self._name!r} expects a tensor of whole numbers; got {dtype}")
        if y.dim() != 2 or len(y) != batch or y.shape[1] <= self.shift:
            raise InputError(f"labels: expected shape ({batch}, tokens) for {batch} sequences; got {tuple(y.shape)}")
        y = check_dense(y, "labels").detach().long()
        if not (y.is_cuda and capturing()):
            counted = (y[:, int(self.shift) :] != self.ignore_index).any()
            lowest = torch.where(y == self.ignore_index, 0, y).amin()
            (later or DeferredChecks("loss")).add(torch.stack([counted.long(), lowest]), self._judge)
        return y

    def errors(self, output: Tensor, labels: Tensor) -> Tensor:
        """Mean over the counted tokens of each sequence, (B,); 0 where none is."""
        output, labels = self._paired(output, labels)
        losses = F.cross_entropy(
            output.flatten(0, 1), labels.flatten(), ignore_index=self.ignore_index, reduction="none"
        )
        counted = (labels != self.ignore_index).sum(1)
        return losses.reshape(labels.shape).sum(1) / counted.clamp(min=1)

    def mean_error(self, output: Tensor, labels: Tensor) -> Tensor:
        """Mean over all counted tokens of the batch, a scalar."""
        output, labels = self._paired(output, labels)
        return F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=self.ignore_index)

    def mean_loss(self, losses: Tensor, low: Tensor, high: Tensor, labels: Tensor) -> Tensor:
        """½ of the mean over all counted tokens at each extreme, a scalar."""
        return 0.5 * (self.mean_error(high, labels) + self.mean_error(low, labels))

    def decide(self, output: Tensor) -> Tensor:
        """Returns the most probable token of each position, (B, T)."""
        return output.argmax(2)

    def trivial(self, labels: Tensor) -> Tensor:
        """0: the few tokens of a batch do not tell the loss of the best constant output."""
        return torch.zeros((), device=labels.device)

    def where(self, x: Batch, labels: Tensor) -> Tensor | None:
        """Which tokens may be perturbed, (B, T); None: all. Prompt tokens are those without a label; padding is never perturbed."""
        allowed = labels == self.ignore_index if self.perturbed == "prompt" else None
        mask = x.get("attention_mask") if isinstance(x, dict) else None
        if isinstance(mask, Tensor) and mask.shape == labels.shape:
            allowed = mask.bool() if allowed is None else allowed & mask.bool()
        return allowed

    def _paired(self, output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and the labels they are compared with."""
        if output.shape[:2] != labels.shape:
            raise InputError(
                f"labels: expected one for each token of the output, {tuple(output.shape[:2])}; got {tuple(labels.shape)}"
            )
        if not labels.is_cuda and int(labels.max()) >= output.shape[2]:
            raise InputError(
                f"labels: expected tokens below {output.shape[2]}, the number of logits; got {int(labels.max())}"
            )
        return (output[:, :-1], labels[:, 1:]) if self.shift else (output, labels)

    def _judge(self, numbers: Sequence[float]) -> str | None:
        counted, lowest = numbers
        if not counted:
            return f"labels: expected at least one token with a label; all are {self.ignore_index} (ignore_index)"
        return None if lowest >= 0 else f"labels: expected tokens from 0 on, or {self.ignore_index}; got {int(lowest)}"

    @property
    def _name(self) -> str:
        return "next-token" if self.shift else "tokens"

    def __repr__(self) -> str:
        return f"targets={self._name!r}, loss='cross-entropy', tokens={self.perturbed!r}"


def entropy(labels: Tensor, classes: int) -> Tensor:
    """Of the shares of the classes, in nats: the cross-entropy of the best constant logits."""
    terms: Tensor = torch.special.entr(shares(labels, classes))
    return terms.sum()


def shares(labels: Tensor, classes: int) -> Tensor:
    """Of each class, (m,), among labels (B,)."""
    ones = torch.ones(len(labels), device=labels.device)
    return torch.zeros(classes, device=labels.device).scatter_add(0, labels, ones) / len(labels)


def binary_errors(output: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    """(f − y)², or −log of the probability that the logit f gives to y, entry by entry."""
    labels = labels.to(output.dtype)
    if loss == "squared":
        return (output - labels).square()
    return F.binary_cross_entropy_with_logits(output, labels, reduction="none")


def scalar(output: Tensor, batch: int) -> Tensor:
    """A scalar output per sample as (B,); anything else is refused."""
    if output.shape == (batch,):
        return output
    if output.shape == (batch, 1):
        return output.squeeze(1)
    if output.dim() and output.shape[0] != batch:
        raise ModelError(
            f"expected one output per sample, ({batch},) or ({batch}, 1); the model returned {tuple(output.shape)}"
        )
    raise ModelError(
        f"expected a scalar output per sample, ({batch},) or ({batch}, 1); the model returned {tuple(output.shape)}: "
        "give classes= for many classes, give the model one output, or pick one with output="
    )


def label_tensor(y: object, batch: int, expected: str) -> Tensor:
    """Returns labels as a tensor (B,), or raises an InputError."""
    if not isinstance(y, Tensor):
        raise InputError(f"labels: expected a tensor of {expected}; got {type(y).__name__}")
    if y.shape not in ((batch,), (batch, 1)):
        raise InputError(f"labels: expected shape ({batch},) or ({batch}, 1) for {batch} inputs; got {tuple(y.shape)}")
    return check_dense(y, "labels").reshape(batch).detach()


def class_labels(y: object, batch: int, classes: int, later: DeferredChecks | None = None) -> Tensor:
    """Integer labels 0 … m − 1, (B,)."""
    y = label_tensor(y, batch, f"whole numbers from 0 to {classes - 1}")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise InputError(f"labels: expected whole numbers from 0 to {classes - 1}; got {y.dtype}: use y.long()")
    y = y.long()
    return y if y.is_cuda and capturing() else accepted(y, classes, partial(_not_a_class, classes=classes), later)


def accepted(y: Tensor, classes: int, problem: Callable[[Any], str], later: DeferredChecks | None) -> Tensor:
    """The labels, if all are whole and from 0 to m − 1; otherwise `problem(label)` of one that is not is raised.

    With `later`, labels on a GPU are judged without waiting for it. Those that are wrong are changed until then: a label out of
    range would be an index out of range, after which no kernel runs in this process any more.
    """
    if later is not None and not y.is_floating_point():
        extremes = torch.stack(torch.aminmax(y))
        later.add(extremes, lambda values: next((problem(n) for n in values if not 0 <= n < classes), None))
        return y.clamp(0, classes - 1)
    good = (y == 0) | (y == 1) if y.is_floating_point() else (y >= 0) & (y < classes)  # floating point: of two classes
    if later is not None:
        first = (~good).to(torch.uint8).argmax()  # 0 if all are good
        numbers = torch.stack([good.all().to(y.dtype), y.take(first)])
        later.add(numbers, lambda values: None if values[0] else problem(values[1]))
        return torch.where(good, y, 0)
    if not bool(good.all()):
        raise InputError(problem(y[~good][0].item()))
    return y


def _not_binary(label: float) -> str:
    return (
        f"labels: expected 0 and 1; got {label}: map the two classes to 0 and 1, give classes= for more, or "
        "targets='values' for a regression"
    )


def _not_finite(extremes: Sequence[float]) -> str | None:
    return None if all(map(math.isfinite, extremes)) else "targets: expected finite numbers; some are NaN or infinite"


def _not_a_class(label: int, classes: int) -> str:
    return f"labels: classes={classes} expects 0 to {classes - 1}; got {label}: change classes=, or number the classes from 0"


def check_loss(loss: object) -> Loss:
    """Returns the name of a loss, or raises an InputError."""
    if loss == "squared":
        return "squared"
    if loss == "cross-entropy":
        return "cross-entropy"
    raise InputError(f"loss: expected 'squared' or 'cross-entropy'; got {shown(loss)}")


def check_classes(classes: object) -> int:
    """Returns the number of classes, at least 2, or raises an InputError."""
    return check_count(classes, "classes", 2)


def check_threshold(threshold: object, loss: Loss) -> float:
    """0.5 for the targets 0 and 1 of the squared error; the logits of the cross-entropy decide at 0, and only there."""
    if threshold is None:
        return 0.5 if loss == "squared" else 0.0
    threshold = check_number(threshold, "threshold")
    if loss == "cross-entropy" and threshold != 0:
        raise InputError(f"threshold: the cross-entropy reads outputs as logits, which decide at 0; got {threshold}")
    return threshold


def values_target(classes: object, hierarchy: object, threshold: object, loss: Loss) -> Values:
    """`Values`; settings of classifiers beside it are refused."""
    for name, passed in (("classes", classes), ("hierarchy", hierarchy), ("threshold", threshold)):
        if passed is not None:
            raise InputError(f"{name}: targets='values' is a regression; got {shown(passed)}: leave one of the two out")
    if check_loss(loss) != "squared":
        raise InputError("loss: targets='values' has the squared error only; got 'cross-entropy'")
    return Values()


TARGETS = ("labels", "values", "tokens", "next-token")


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


def choose_target(classes: int | None, threshold: float | None, loss: Loss) -> Binary | Codes:
    """`Binary` without classes, `Codes` with them."""
    if classes is None:
        return Binary(threshold, loss)
    if threshold is not None:
        raise InputError(
            f"threshold: classes={classes} decide for the nearest code; got {shown(threshold)}: leave it out, or leave out classes="
        )
    return Codes(classes, loss)
