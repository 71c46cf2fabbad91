"""A trained model as the theorems see it: what they ask of it, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from excite.bounds import Bound, Descent
from excite.bounds.relu_network import ReluNetwork, relu_network
from excite.errors import ModelError
from excite.report.audit.chains import Pairs, linear_chain
from excite.report.audit.training_setup import Setting

_MOST = 1e10  # Σ units · width³ of the eigenvalue problems of one theorem: some ten seconds


@dataclass(frozen=True)
class Promise:
    """What a theorem says, and the measured quantity beside it: `truth`, found as `how` says; None if not measured.

    `layers`: where the theorem bounds the norm of each layer's weight, (bound, measured) of each.
    """

    bound: Bound
    truth: float | None
    how: str
    layers: tuple[tuple[float, float], ...] = ()

    @property
    def ratio(self) -> float | None:
        """How loose the bound is, at least 1 where it is right: bound over truth, or truth over a lower bound."""
        if self.bound.value is None or self.truth is None:
            return None
        above, below = (self.bound.value, self.truth)[:: 1 if self.bound.side == "upper" else -1]
        return above / below if below > 0 else None


@dataclass(frozen=True)
class Silent:
    """A theorem that does not speak about the model."""

    theorem: str
    why: str


@dataclass(frozen=True)
class Subject:
    """A model with its training points x, y: all of them if `complete`. `classes` is 0 for a regression."""

    model: nn.Module
    x: Tensor
    y: Tensor
    of: int  # training points in all
    classes: int
    setting: Setting
    threshold: float

    @property
    def complete(self) -> bool:
        return len(self.x) == self.of


def as_relu(subject: Subject, loss: str = "squared") -> ReluNetwork:
    """The network, if it is a ReLU network trained with `loss` and all its training points are here."""
    if subject.setting.loss != loss:
        words = {"squared": "squared error", "cross-entropy": "cross-entropy", None: "a loss that is not known"}
        raise ModelError(f"it is about {words[loss]}; the network was trained with {words[subject.setting.loss]}")
    network = relu_network(subject.model, subject.x[:50])
    need_all_points(subject)
    work = sum(w.shape[0] * float(w.shape[1]) ** 3 for w in network.weights[:-1])
    if loss == "squared" and work > _MOST:
        raise ModelError("the network is so wide that this takes long: call it from excite.bounds")
    return network


def known_descent(subject: Subject) -> Descent:
    if subject.setting.descent is None:
        raise ModelError(subject.setting.why)
    return subject.setting.descent


def as_linear(subject: Subject, least: int) -> Pairs:
    pairs = linear_chain(subject.model, subject.x[:50])
    if (len(pairs) > 1) != (least > 1):
        raise ModelError(
            f"expected {'several linear layers' if least > 1 else 'one linear layer'}; the network has {len(pairs)}"
        )
    if subject.setting.loss is None:
        raise ModelError(subject.setting.why)
    need_all_points(subject)
    return pairs


def need_all_points(subject: Subject) -> None:
    if not subject.complete:
        raise ModelError(
            f"it needs all training points; this page used {len(subject.x)} of {subject.of}: ask for more points"
        )


def need_two_classes(subject: Subject) -> None:
    if subject.classes != 2:
        raise ModelError(f"it is about two classes; the data has {subject.classes or 'none'}")
