"""The model, data and training setup that the theorems are applied to, and their results."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from excite._core.compatibility import renamed_attribute
from excite.bounds import Bound, Descent
from excite.bounds.relu_network import ReluNetwork, relu_network
from excite.errors import ModelError
from excite.report.audit.chains import Pairs, linear_chain
from excite.report.audit.training_setup import TrainingSetup

_MAX_WORK = 1e10  # Σ units · width³ of the eigenvalue problems of one theorem: some ten seconds


@dataclass(frozen=True)
class TheoremResult:
    """The bound of a theorem and the measured quantity that it bounds.

    Attributes:
        bound: The bound, with its assumptions checked.
        measured: The quantity itself, or None if it was not measured.
        how: How it was measured.
        layers: (bound, measured norm) of each layer's weight, where the theorem bounds them.
    """

    bound: Bound
    measured: float | None
    how: str
    layers: tuple[tuple[float, float], ...] = ()
    truth = renamed_attribute("truth", "measured")

    @property
    def ratio(self) -> float | None:
        """Looseness, at least 1 for a correct bound: upper bound / measured, or measured / lower bound."""
        if self.bound.value is None or self.measured is None:
            return None
        above, below = (self.bound.value, self.measured)[:: 1 if self.bound.side == "upper" else -1]
        return above / below if below > 0 else None


@dataclass(frozen=True)
class NotApplicable:
    """A theorem that does not apply to the model."""

    theorem: str
    why: str


@dataclass(frozen=True)
class AuditTarget:
    """A model with training points x, y (all of them if `complete`); `classes` is 0 for a regression."""

    model: nn.Module
    x: Tensor
    y: Tensor
    total: int  # number of training points
    classes: int
    setup: TrainingSetup
    threshold: float

    @property
    def complete(self) -> bool:
        """Whether all training points are included."""
        return len(self.x) == self.total


def as_relu(target: AuditTarget, loss: str = "squared") -> ReluNetwork:
    """The network, if it is a ReLU network trained with `loss` and all training points are included."""
    if target.setup.loss != loss:
        names = {"squared": "squared error", "cross-entropy": "cross-entropy", None: "an unknown loss"}
        raise ModelError(f"it requires {names[loss]}; the network was trained with {names[target.setup.loss]}")
    network = relu_network(target.model, target.x[:50])
    need_all_points(target)
    operations = sum(w.shape[0] * float(w.shape[1]) ** 3 for w in network.weights[:-1])
    if loss == "squared" and operations > _MAX_WORK:
        raise ModelError("the network is too wide for an audit: call the function of excite.bounds directly")
    return network


def known_descent(target: AuditTarget) -> Descent:
    """Step size and momentum of the training; refused where they are unknown."""
    if target.setup.descent is None:
        raise ModelError(target.setup.why)
    return target.setup.descent


def as_linear(target: AuditTarget, min_layers: int) -> Pairs:
    """Layers of a linear network with one layer (`min_layers` 1) or several; other models are refused."""
    pairs = linear_chain(target.model, target.x[:50])
    if (len(pairs) > 1) != (min_layers > 1):
        raise ModelError(
            f"expected {'several linear layers' if min_layers > 1 else 'one linear layer'}; the network has {len(pairs)}"
        )
    if target.setup.loss is None:
        raise ModelError(target.setup.why)
    need_all_points(target)
    return pairs


def need_all_points(target: AuditTarget) -> None:
    """Raises ModelError unless all training points are included."""
    if not target.complete:
        raise ModelError(
            f"it requires all training points; this audit uses {len(target.x)} of {target.total}: raise points="
        )


def need_two_classes(target: AuditTarget) -> None:
    """Raises ModelError unless the data has two classes."""
    if target.classes != 2:
        raise ModelError(f"it requires two classes; the data has {target.classes or 'none'}")
