"""Calls of the public API in which something is wrong: each ends in an answer, or in one line that says what to do.

    python -m benchmarks.hostile [--calls 10000] [--seed 0] [--only NAME]

Every call is one of `CALLS` with valid arguments, of which one (in a fifth of the calls two) is replaced by a value from
`HOSTILE`. Counts as good: a finite answer, or an `ExciteError`, `TypeError` or `ValueError` that Excite itself raised, with a
message of one line; in the training step also what the user's own module raised. The model must be as before. Prints the
counts by outcome, and every kind of bad outcome with a call that leads to it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import math
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import excite
from excite import bounds, lipschitz, probes, wiring
from excite.errors import ExciteError
from excite.margin.fixed_radius import robust_accuracy
from excite.report import audit as auditing

LIMIT = 20  # seconds that one call may take
GOOD = ("answer", "refused", "the model's own error")
SOURCE = str(Path(excite.__file__).parent)


class Hang(BaseException):
    """A call took longer than LIMIT seconds."""


# -- values ------------------------------------------------------------------------------------------------------------
class Raises(nn.Module):
    """A module that raises after its first layer and its running statistics."""

    def __init__(self, error: Exception):
        super().__init__()
        self.layer, self.norm, self.error = nn.Linear(5, 3).double(), nn.BatchNorm1d(3).double(), error

    def forward(self, x: Tensor) -> Tensor:
        self.norm(self.layer(x))
        raise self.error


class Returns(nn.Module):
    """A module whose output is `change` of that of a linear layer."""

    def __init__(self, change: Callable[[Tensor], Any]):
        super().__init__()
        self.layer, self.change = nn.Linear(5, 1).double(), change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.layer(x))


def network(outputs: int = 1, norm: bool = True) -> nn.Sequential:
    middle = [nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.1)] if norm else [nn.ReLU()]
    return nn.Sequential(nn.Linear(5, 6), *middle, nn.Linear(6, outputs)).double()


def filled(value: float) -> nn.Module:
    model = network()
    with torch.no_grad():
        model[0].weight[0, 0] = value  # type: ignore[index]
    return model


def _raise(*_: Any) -> Any:
    raise KeyError("a function of the user")


def _inputs(rows: int = 8) -> Tensor:
    return torch.randn(rows, 5, dtype=torch.float64)


def _with(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    x = _inputs()
    x[0, 0] = value
    return x.to(dtype)


JUNK: list[Callable[[], Any]] = [
    lambda: None, lambda: "text", lambda: object(), list, dict, lambda: (), lambda: 1.5, lambda: -1, lambda: True,
    lambda: math.nan, lambda: 10**30, lambda: torch.ones(3), lambda: np.ones(3), lambda: nn.Linear, lambda: b"bytes",
]  # fmt: skip
TENSORS: list[Callable[[], Any]] = [
    lambda: _with(math.nan), lambda: _with(math.inf), lambda: _inputs().to(torch.int64), lambda: _inputs() > 0,
    lambda: _inputs().to(torch.complex128), lambda: _inputs().half(), lambda: _inputs().float(), lambda: _inputs().bfloat16(),
    lambda: _inputs().to("meta"), lambda: _inputs().to_sparse(), lambda: _inputs().to_sparse_csr(), lambda: _inputs(0), lambda: _inputs()[0],
    lambda: torch.tensor(1.0), lambda: _inputs()[:, :3], lambda: _inputs()[:, None], lambda: _inputs()[:, :0], lambda: _inputs().numpy(),
    lambda: _inputs().tolist(), lambda: _with(1e300), lambda: _inputs().requires_grad_() * 2, lambda: (_inputs(), _inputs()),
    lambda: {"x": _inputs()}, lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    lambda: torch.quantize_per_tensor(torch.ones(8, 5), 0.1, 0, torch.qint8), lambda: _inputs(1).expand(8, 5), lambda: _inputs().to(torch.uint8),
]  # fmt: skip
HOSTILE: dict[str, list[Callable[[], Any]]] = {
    "model": [
        lambda: Raises(RuntimeError("inside the model")), lambda: Raises(KeyError("key")), lambda: Raises(ValueError("two\nlines")),
        lambda: Raises(MemoryError()), lambda: Raises(AssertionError()), lambda: filled(math.nan), lambda: filled(math.inf), lambda: filled(-math.inf),
        lambda: filled(1e308), lambda: network().to("meta"), lambda: network().half(), lambda: network().float(), lambda: network().to(torch.bfloat16),
        lambda: network().to(torch.complex128), lambda: nn.Identity(), lambda: nn.Sequential(), lambda: nn.Flatten(), lambda: nn.LazyLinear(1),
        lambda: nn.Linear(3, 1).double(), lambda: nn.Linear(5, 0).double(), lambda: nn.Conv2d(1, 1, 3).double(), lambda: nn.Embedding(4, 2).double(),
        lambda: nn.LSTM(5, 2).double(), lambda: nn.ModuleList([nn.Linear(5, 1)]), lambda: nn.Linear(5, 1).double().requires_grad_(False),
        lambda: Returns(lambda f: None), lambda: Returns(lambda f: (f, f)), lambda: Returns(lambda f: {"a": f}), lambda: Returns(lambda f: "text"),
        lambda: Returns(lambda f: f.sum()), lambda: Returns(lambda f: f[:1]), lambda: Returns(lambda f: f.long()), lambda: Returns(lambda f: f.detach()),
        lambda: Returns(lambda f: f * math.nan), lambda: Returns(lambda f: f > 0), lambda: Returns(lambda f: f.to_sparse()),
        lambda: Returns(lambda f: f.item()), lambda: Returns(lambda f: f.to(torch.complex128)), lambda: Returns(lambda f: f[:, None, None]),
        lambda: Returns(lambda f: []), lambda: Returns(lambda f: f[:, :0]), lambda: Returns(lambda f: f.to("meta")),
        *JUNK,
    ],
    "x": [*TENSORS, *JUNK],
    "y": [
        lambda: torch.full((8,), -1), lambda: torch.full((8,), 10**9), lambda: torch.full((8,), 2**62), lambda: torch.zeros(8),
        lambda: torch.full((8,), math.nan), lambda: torch.full((8,), 0.5), lambda: torch.zeros(7, dtype=torch.long), lambda: torch.zeros(8, 3),
        lambda: torch.zeros(8, dtype=torch.long, device="meta"), lambda: torch.zeros(8).to_sparse(), lambda: torch.tensor(1), lambda: torch.zeros(0, dtype=torch.long),
        lambda: torch.zeros(8, dtype=torch.complex64), lambda: torch.zeros(8, dtype=torch.bool), lambda: ["a"] * 8, lambda: [0] * 8,
        lambda: np.zeros(8), lambda: torch.full((8,), math.inf), lambda: torch.full((8,), 255, dtype=torch.uint8), *JUNK,
    ],
    "count": [lambda: 0, lambda: -1, lambda: 1.5, lambda: True, lambda: "3", lambda: None, lambda: 10**30, lambda: 2**63, lambda: math.nan,
              lambda: torch.tensor(2), lambda: np.int64(2), lambda: 2.0, lambda: [1], lambda: 1j, lambda: -(2**70)],
    "number": [lambda: -1, lambda: math.nan, lambda: math.inf, lambda: "a", lambda: None, lambda: True, lambda: 1j, lambda: torch.ones(3), lambda: 1e308,
               lambda: 10**400, lambda: [0.1], dict, lambda: np.float64(0.1), lambda: -math.inf, lambda: 0, lambda: torch.tensor(0.1)],
    "norm": [lambda: "3", lambda: 3, lambda: None, list, lambda: math.nan, lambda: object(), lambda: True, lambda: torch.tensor(2), dict,
             lambda: 2.0, lambda: np.inf, lambda: 10**400],
    "pick": [lambda: 0, lambda: -1, lambda: "logits", lambda: "T", lambda: 10**30, lambda: object(), lambda: _raise, lambda: (lambda f: None), lambda: 1.5,
             lambda: (lambda f: f[:1]), lambda: [0], lambda: True, lambda: (), lambda: "data", lambda: (lambda f: f.detach()), lambda: nn.Linear],
    "bounds": [lambda: (1, 0), lambda: (math.nan, 1), lambda: 3, lambda: ("a", "b"), lambda: (torch.zeros(3), torch.ones(3)), lambda: (0,), lambda: (-9, None),
               lambda: "ab", lambda: (0.0, 0.001), lambda: (-math.inf, math.inf), lambda: (1j, 2), lambda: (-(10**400), 10**400),
               lambda: (torch.zeros(5, device="meta"), torch.ones(5, device="meta")), lambda: (torch.full((5,), math.nan), 9.0), dict, lambda: (None, None)],
    "flag": [lambda: 1, lambda: "yes", lambda: None, list, lambda: torch.ones(3), lambda: object()],
    "seed": [lambda: -1, lambda: 1.5, lambda: "a", lambda: 2**64, lambda: None, lambda: 10**30, lambda: True, list, lambda: -(2**70)],
    "layers": [lambda: "x", list, lambda: ["nope"], lambda: 3, lambda: [3], lambda: None, dict, lambda: [""], lambda: "all", lambda: "input",
               lambda: object(), lambda: [None], lambda: ("0",), lambda: ["0", "0"]],
    "choice": [lambda: "x", lambda: 3, lambda: None, list, dict, lambda: math.nan, lambda: object(), lambda: "", lambda: b"", lambda: torch.ones(2)],
    "classes": [lambda: 0, lambda: 1, lambda: -1, lambda: 1.5, lambda: "a", lambda: 10**9, lambda: 10**30, lambda: True, list, lambda: 3, lambda: object()],
    "range": [lambda: (1, 0), lambda: 3, lambda: None, lambda: ("a", "b"), lambda: (0,), lambda: (math.nan, 1), lambda: (0, math.inf), lambda: (0, 1, 2), dict,
              lambda: (0, 10**400), lambda: (1j, 2)],
    "size": [lambda: 0, lambda: -1, lambda: (2,), lambda: (0, 3), lambda: "a", lambda: None, lambda: 10**30, lambda: (10**30, 2), lambda: 1.5, lambda: (2, 3, 4),
             lambda: True, lambda: 10**7],
    "radii": [list, lambda: 3, lambda: None, lambda: [1, 0], lambda: ["a"], lambda: [math.nan], lambda: [-1], lambda: [math.inf], lambda: "ab",
              dict, lambda: [10**400], lambda: [True], lambda: torch.tensor([0.1]), lambda: [None], lambda: 1j],
    "function": [lambda: _raise, lambda: 3, lambda: "text", list, lambda: (lambda *_: None), lambda: (lambda *_: math.nan), lambda: (lambda *_: torch.ones(3))],
    "optimizer": [lambda: None, lambda: 3, lambda: "sgd", lambda: torch.optim.SGD, lambda: torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1), lambda: object()],
    "probes": [lambda: 3, lambda: [3], lambda: "loss", lambda: [None], lambda: [probes.Loss], list, dict, lambda: [probes.Loss(), probes.Loss()], lambda: object()],
    "path": [lambda: 3, lambda: "", lambda: "\0", lambda: "/proc/nothing/here", lambda: b"x", lambda: object(), lambda: "/dev/null", lambda: "a" * 5000, list,
             lambda: None, lambda: Path("/nowhere/at/all"), lambda: 1.5],
    "numbers": [list, lambda: [math.nan], lambda: ["a"], lambda: None, lambda: 3, lambda: [-1.0], lambda: torch.ones(2, 2), lambda: "text", dict,
                lambda: torch.ones(3, device="meta"), lambda: torch.ones(3).to_sparse(), lambda: [10**400], lambda: [1j], lambda: [[1], [2, 3]], lambda: object(),
                lambda: [math.inf], lambda: torch.ones(3).half(), lambda: torch.ones(3).to(torch.complex64)],
    "metrics": [lambda: None, lambda: 3, lambda: {"": 1.0}, lambda: {3: 1.0}, lambda: {"a": "b"}, lambda: {"a": torch.ones(3)}, lambda: {"a": 10**400}, lambda: {"a": None},
                lambda: {"a": torch.ones(1, device="meta")}, lambda: {"a": 1j}, lambda: [1], lambda: {"a\n": 1.0}, lambda: {"a": []}, lambda: {"a": torch.ones(1).to_sparse()}],
    "json": [lambda: object(), lambda: {1: object()}, lambda: torch.ones(2), lambda: {"a": math.nan}, lambda: b"", lambda: 1j, lambda: {(1, 2): 3}],
    "weights": [list, lambda: None, lambda: [None], lambda: [torch.ones(2)], lambda: [torch.ones(2, 3), torch.ones(2, 2)], lambda: 3, lambda: "text",
                lambda: [torch.full((1, 5), math.nan)], lambda: [torch.ones(1, 5, device="meta")], lambda: [torch.ones(1, 5).to_sparse()], lambda: [[1]], dict,
                lambda: [torch.ones(1, 5).to(torch.complex64)], lambda: [torch.ones(0, 5)], lambda: object()],
}  # fmt: skip


# -- calls -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Call:
    """`function(**arguments)`; `arguments` are (role, a valid value) by name. `trains`: part of the training step."""

    function: Callable[..., Any]
    arguments: dict[str, tuple[str, Callable[[], Any]]]
    trains: bool = False


def _labels() -> Tensor:
    return torch.arange(8) % 2


def _descent(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01)


MODEL, PLAIN, X, Y = ("model", network), ("model", lambda: network(norm=False)), ("x", _inputs), ("y", _labels)
PICK, NORM = ("pick", lambda: None), ("norm", lambda: "2")
SETTING: dict[str, tuple[str, Callable[[], Any]]] = {
    "radius": ("number", lambda: 0.05), "norm": ("norm", lambda: "inf"), "steps": ("count", lambda: 2), "layers": ("layers", lambda: "all"),
    "threshold": ("number", lambda: 0.5), "bounds": ("bounds", lambda: None), "output": PICK, "classes": ("classes", lambda: None),
    "loss": ("choice", lambda: "squared"), "kind": ("choice", lambda: "additive"), "turns": ("count", lambda: 1), "hierarchy": ("choice", lambda: None),
}  # fmt: skip
ATTACK = {
    **{key: SETTING[key] for key in ("radius", "norm", "steps", "threshold", "bounds", "output", "classes", "loss")},
    "step_size": ("number", lambda: None), "random_start": ("flag", lambda: False),
}  # fmt: skip


def _method(kind: type, name: str) -> Callable[..., Any]:
    def function(model: Any, x: Any, y: Any = None, **setting: Any) -> Any:
        method = getattr(kind(model, **setting), name)
        with torch.set_grad_enabled(name == "loss"):
            return method(x) if y is None else method(x, y)

    return function


def _watched(model: Any, x: Any, loss: Any = 0.5, optimizer: Any = None, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with excite.watch(model, x, None, optimizer, **options) as watching:
            watching.step(loss)


def _conserved(model: Any, optimizer: Any, x: Any, **options: Any) -> Any:
    with probes.conservation(model, optimizer, x, **options) as ledger:
        return ledger.read()


def _logged(step: Any, values: Any, name: Any, value: Any, keep: Any) -> None:
    with tempfile.TemporaryDirectory() as folder, excite.Run.create(Path(folder) / "run", {}, keep=keep) as run:
        run.log(step, values)
        run.write_json(name, value)
        run.flush()


CALLS: dict[str, Call] = {
    "trace": Call(lambda **given: str(excite.trace(**given)), {"model": MODEL, "example": X, "output": PICK}),
    **{f"PersistentExcitation.{name}": Call(_method(excite.PersistentExcitation, name), {"model": MODEL, "x": X, **({"y": Y} if name.startswith("loss") else {}), **SETTING}, name.startswith("loss")) for name in ("loss", "extremes", "predict", "perturbations")},
    **{f"AdversarialTraining.{name}": Call(_method(excite.AdversarialTraining, name), {"model": MODEL, "x": X, **({} if name == "predict" else {"y": Y}), **ATTACK}, name == "loss") for name in ("loss", "perturbations", "predict")},
    "margins": Call(excite.margins, {
        "model": MODEL, "x": X, "y": Y, "norm": NORM, "bounds": ("bounds", lambda: None), "threshold": ("number", lambda: 0.5), "output": PICK,
        "steps": ("count", lambda: 3), "restarts": ("count", lambda: 1), "evidence": ("flag", lambda: False), "certify": ("flag", lambda: False),
        "lipschitz": ("number", lambda: None), "batch": ("count", lambda: 8), "seed": ("seed", lambda: 0), "layers": ("layers", lambda: "input"),
        "relative": ("flag", lambda: False), "perturbations": ("flag", lambda: False)}),
    "robust_accuracy": Call(robust_accuracy, {
        "model": MODEL, "x": X, "y": Y, "radii": ("radii", lambda: [0.0, 0.1]), "norm": NORM, "bounds": ("bounds", lambda: None), "classes": ("classes", lambda: None),
        "threshold": ("number", lambda: 0.5), "steps": ("count", lambda: 2), "restarts": ("count", lambda: 1), "batch": ("count", lambda: 8), "seed": ("seed", lambda: 0)}),
    "watch": Call(_watched, {"model": MODEL, "x": X, "loss": ("number", lambda: 0.5), "optimizer": ("optimizer", lambda: None), "probes": ("probes", lambda: None),
                             "every": ("count", lambda: None), "output": PICK, "alerts": ("probes", lambda: None), "margin_batch": ("x", lambda: None), "strict": ("flag", lambda: True)}, True),
    "lipschitz.local": Call(lipschitz.local, {"model": MODEL, "x": X, "norm": NORM, "output": PICK}),
    "lipschitz.bound": Call(lipschitz.bound, {"model": MODEL, "example": X, "norm": NORM, "output": PICK}),
    "lipschitz.largest": Call(lipschitz.largest, {"model": MODEL, "x": X, "radius": ("number", lambda: 0.1), "norm": NORM, "ball": NORM, "bounds": ("bounds", lambda: None),
                                                  "rounds": ("count", lambda: 2), "places": ("count", lambda: 8), "seed": ("seed", lambda: 0), "output": PICK}),
    "lipschitz.along": Call(lipschitz.along, {"model": MODEL, "start": X, "end": X, "norm": NORM, "limit": ("count", lambda: 100), "output": PICK}),
    "lipschitz.region_map": Call(lipschitz.region_map, {
        "model": MODEL, **{part: ("x", lambda: _inputs()[0]) for part in ("origin", "right", "up")}, "across": ("range", lambda: (-1.0, 1.0)),
        "upward": ("range", lambda: (-1.0, 1.0)), "size": ("size", lambda: 4), "norm": NORM, "output": PICK}),
    "audit": Call(lambda what, x, y, **options: auditing.audit(what, (x, y), **options), {
        "what": PLAIN, "x": X, "y": Y, "descent": ("number", lambda: None), "loss": ("choice", lambda: None), "threshold": ("number", lambda: 0.5),
        "points": ("count", lambda: 8), "margin_points": ("count", lambda: 2), "units": ("flag", lambda: False), "with_margins": ("flag", lambda: False)}),
    "probes.richness": Call(probes.richness, {
        "model": MODEL, "data": X, "units": ("flag", lambda: False), "patches": ("count", lambda: 4), "exact": ("count", lambda: 16), "sketch": ("count", lambda: 4),
        "tolerance": ("number", lambda: None), "accuracy": ("number", lambda: 1e-4), "batch": ("count", lambda: 4), "memory": ("count", lambda: 16), "seed": ("seed", lambda: 0)}),
    "probes.alignment": Call(probes.alignment, {"model": MODEL, "example": X, "exact": ("count", lambda: 16), "iterations": ("count", lambda: 2), "output": PICK}),
    "probes.trajectory": Call(probes.trajectory, {
        "model": MODEL, "x": X, "y": ("y", lambda: None), "loss": ("function", lambda: None), "layers": ("layers", lambda: "first"), "output": PICK,
        "batch": ("count", lambda: 4), "tolerance": ("number", lambda: 1e-6)}),
    "probes.conservation": Call(_conserved, {"model": MODEL, "optimizer": ("optimizer", lambda: _descent), "x": X, "output": PICK, "off_diagonal": ("flag", lambda: False), "tolerance": ("number", lambda: None)}),
    "probes.effective_rank": Call(probes.effective_rank, {"rows": X}),
    "probes.smallest_eigenvalue": Call(probes.smallest_eigenvalue, {"matrix": ("x", lambda: torch.eye(3).double()), "tolerance": ("number", lambda: None), "accuracy": ("number", lambda: 1e-4)}),
    "probes.distance": Call(probes.distance, {"parameters": ("weights", lambda: [_inputs()]), "initial": ("weights", lambda: [_inputs()])}),
    "probes.angle": Call(probes.angle, {"one": ("weights", lambda: [_inputs()]), "other": ("weights", lambda: [_inputs()])}),
    "probes.sign_changes": Call(probes.sign_changes, {"before": ("weights", lambda: [_inputs()]), "after": ("weights", lambda: [_inputs()])}),
    "probes.consistency": Call(probes.consistency, {"patterns": ("x", lambda: torch.ones(2, 3, 4) > 0), "slopes": ("x", lambda: torch.ones(2, 3))}),
    "wiring.path_count": Call(wiring.path_count, {"model": MODEL, "example": X, "biases": ("flag", lambda: False), "output": PICK}),
    "wiring.fully_connected": Call(wiring.fully_connected, {"weights": ("weights", lambda: [torch.ones(3, 5), torch.ones(1, 3)])}),
    "bounds.deep_lipschitz": Call(bounds.deep_lipschitz, {"model": PLAIN, "x": X, "y": Y, "descent": ("number", lambda: 0.1), "form": ("choice", lambda: "unit"), "loss": ("choice", lambda: "half-sum"), "tolerance": ("number", lambda: 1e-4)}),
    "bounds.two_layer_lipschitz": Call(bounds.two_layer_lipschitz, {"model": PLAIN, "x": X, "y": Y, "descent": ("number", lambda: 0.1), "form": ("choice", lambda: "unit"), "loss": ("choice", lambda: "half-sum"), "tolerance": ("number", lambda: 1e-4)}),
    "bounds.linear_margin": Call(bounds.linear_margin, {"x": X, "y": Y, "angle": ("number", lambda: 0.1)}),
    "bounds.covering_number": Call(bounds.covering_number, {"x": X, "radius": ("number", lambda: 0.5)}),
    "bounds.steadiness": Call(bounds.steadiness, {"updates": ("numbers", lambda: [1.0, 0.5]), "share": ("number", lambda: 0.5)}),
    "bounds.steady_lipschitz": Call(bounds.steady_lipschitz, {"updates": ("numbers", lambda: [1.0, 0.5]), "sigma": ("number", lambda: 1.0), "points": ("count", lambda: 5), "tau": ("count", lambda: 0), "confidence": ("number", lambda: 0.9)}),
    "bounds.trajectory_length": Call(bounds.trajectory_length, {name: ("numbers", lambda: [1.0, 0.5, 0.2]) for name in ("lipschitz", "largest", "smallest")}),
    "bounds.radius_of_penalty": Call(bounds.radius_of_penalty, {"x": X, "y": ("y", lambda: torch.randn(8)), "penalty": ("number", lambda: 0.1), "norm": NORM}),
    "bounds.alignment": Call(bounds.alignment, {"weights": ("weights", lambda: [torch.randn(3, 5), torch.randn(1, 3)])}),
    "bounds.sharpness": Call(bounds.sharpness, {"model": PLAIN, "loss": ("function", lambda: lambda model: model(torch.ones(2, 5).double()).square().mean()), "most": ("count", lambda: 20), "seed": ("seed", lambda: 0)}),
    "bounds.reduced_alignment": Call(bounds.reduced_alignment, {"model": PLAIN, "example": X, "tolerance": ("number", lambda: 1e-3), "output": PICK}),
    "load_run": Call(excite.load_run, {"path": ("path", lambda: "/nowhere")}),
    "Run.log": Call(_logged, {"step": ("count", lambda: 0), "values": ("metrics", lambda: {"a": 1.0}), "name": ("path", lambda: "a"), "value": ("json", lambda: {"a": 1}), "keep": ("count", lambda: 2)}),
}  # fmt: skip


# -- outcomes ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Outcome:
    """What one call led to; `what` names the call, its replaced arguments and the error."""

    name: str
    result: str
    what: str

    @property
    def good(self) -> bool:
        return self.result in GOOD


def _fingerprint(model: Any, trains: bool) -> Any:
    """What must not change, NaN included."""
    if not isinstance(model, nn.Module):
        return None
    modules = list(model.modules())
    shape = [
        (m.training, len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), sorted(vars(m)))
        for m in modules
    ]
    random_state = torch.get_rng_state().numpy().tobytes()
    if trains:
        return shape
    tensors = [
        t for t in (*model.parameters(), *model.buffers()) if not isinstance(t, nn.parameter.UninitializedParameter)
    ]
    values = [
        t.detach().contiguous().view(torch.uint8).numpy().tobytes()
        if t.device.type == "cpu" and t.dim() and t.numel()
        else t.device.type == "cpu" and t.dim() == 0 and str(t.item())
        for t in tensors
    ]
    return shape, values, [p.grad is None for p in model.parameters()], random_state


def _numbers(found: Any, depth: int = 0) -> Iterator[float]:
    """The numbers of an answer."""
    if isinstance(found, Tensor):
        if found.is_floating_point() and found.device.type == "cpu":
            yield from found.detach().double().reshape(-1).tolist()
    elif isinstance(found, float):
        yield found
    elif depth < 4 and isinstance(found, tuple | list):
        for part in found:
            yield from _numbers(part, depth + 1)
    elif depth < 4 and isinstance(found, dict):
        for part in found.values():
            yield from _numbers(part, depth + 1)
    elif depth < 4 and dataclasses.is_dataclass(found):
        for field in dataclasses.fields(found):
            yield from _numbers(getattr(found, field.name, None), depth + 1)


def _of_the_model(error: BaseException) -> bool:
    """Whether the user's module or function raised it: torch was asked to do something by the module's forward."""
    return any(frame.name in ("_call_impl", "_raise") for frame in traceback.extract_tb(error.__traceback__))


def _judge(error: BaseException, trains: bool) -> str:
    ours = traceback.extract_tb(error.__traceback__)[-1].filename.startswith(SOURCE)
    if isinstance(error, ExciteError) or (isinstance(error, TypeError | ValueError) and ours):
        return "refused" if "\n" not in str(error) and str(error) else "several lines"
    if isinstance(error, TypeError) and "unexpected keyword" in str(error):
        return "refused"
    if trains and _of_the_model(error):
        return "the model's own error"
    return "raw error"


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _valid(call: Call) -> dict[str, Any]:
    return {key: make() for key, (_, make) in call.arguments.items()}


def _with_optimizer(arguments: dict[str, Any]) -> dict[str, Any]:
    """The valid optimizer is one of the model, where that has parameters."""
    if arguments.get("optimizer") is not _descent:
        return arguments
    model = arguments["model"]
    fit = isinstance(model, nn.Module) and any(True for _ in model.parameters())
    return {**arguments, "optimizer": _descent(model if fit else network())}


def valid_call(name: str, seed: int = 0) -> Any:
    """The answer to valid arguments."""
    torch.manual_seed(seed)
    return CALLS[name].function(**_with_optimizer(_valid(CALLS[name])))


def hostile_call(name: str, number: int, seed: int) -> Outcome:
    """The call `number` of `name`: which arguments are replaced, and by what, follows from number and seed alone."""
    call, rng = CALLS[name], random.Random(f"{name} {number} {seed}")
    torch.manual_seed(rng.randrange(2**31))
    arguments = _valid(call)
    slots = [(key, i) for key, (role, _) in call.arguments.items() for i in range(len(HOSTILE[role]))]
    replaced = {}
    for key, i in rng.sample(slots, 2 if rng.random() < 0.2 else 1):
        arguments[key] = replaced[key] = HOSTILE[call.arguments[key][0]][i]()
    arguments = _with_optimizer(arguments)
    shown = ", ".join(f"{key}={_short(value)}" for key, value in replaced.items())
    model = arguments.get("model", arguments.get("what"))
    before = _fingerprint(model, call.trains)
    try:
        with _limited(), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            found = call.function(**arguments)
        result = "silent NaN" if not call.trains and any(math.isnan(v) for v in _numbers(found)) else "answer"
        why = ""
    except Hang:
        result, why = "hang", f"longer than {LIMIT} s"
    except Exception as raised:
        result, why = _judge(raised, call.trains), f"{type(raised).__name__}: {str(raised)[:120]!r}"
        if result == "raw error":
            last = [f for f in traceback.extract_tb(raised.__traceback__) if f.filename.startswith(SOURCE)][-1:]
            why += "".join(f" at {Path(f.filename).relative_to(SOURCE)}:{f.lineno}" for f in last)
    if before != _fingerprint(model, call.trains):
        result = "changed the model"
    return Outcome(name, result, f"{name}({shown}) {why}")


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = "sparse " if value.layout is not torch.strided else ""
        shape = "nested" if value.is_nested else tuple(value.shape)
        return f"{kind}{value.dtype} {shape} {value.device.type}"
    return " ".join(repr(value).split())[:60]


def outcomes(calls: int, seed: int = 0, only: str = "") -> Iterator[Outcome]:
    """`calls` hostile calls, in turn of each function."""
    names = [name for name in CALLS if only in name]
    for number in range(calls):
        yield hostile_call(names[number % len(names)], number // len(names), seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="functions whose name contains this")
    options = parser.parse_args()
    began, done = time.monotonic(), list(outcomes(options.calls, options.seed, options.only))
    counts = Counter(one.result for one in done)
    print("| outcome | calls |\n| --- | --- |")
    for result, count in counts.most_common():
        print(f"| {result} | {count:,} |")
    print(f"\n{len(done):,} calls of {len({one.name for one in done})} functions in {time.monotonic() - began:.0f} s")
    bad = [one for one in done if not one.good]
    for one in bad:
        print(f"{one.result}: {one.what}", file=sys.stderr)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
