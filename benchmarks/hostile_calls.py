"""The table of `benchmarks.hostile`: public functions with valid arguments, and hostile values by role."""

from __future__ import annotations

import contextlib
import math
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import excite
from excite import bounds, data, lipschitz, probes, report, runs, studies, wiring
from excite import train as fit
from excite.excitation import HiddenOptions
from excite.margin import SearchOptions, loader_margins, smoothed_margins
from excite.margin.fixed_radius import broken_at, robust_accuracy
from excite.monitor import alerts
from excite.report import audit as auditing
from excite.train.config import parse_config
from excite.train.models.gpt import GPT


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


def perceptron(seed: int = 0) -> nn.Sequential:
    """What the theorems and the training of many networks at once take."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1)).double()


def nested(depth: int) -> list[Any]:
    groups: list[Any] = [0]
    for _ in range(depth):
        groups = [groups]
    return groups


def _dataset(x: Any, y: Any = None) -> Any:
    y = _labels() if y is None else y
    return data.Dataset("toy", x, y, x, y, ("a", "b"), None, "eight points")


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
    "array": [lambda: np.ones(3), lambda: np.ones((3, 0)), lambda: np.full((3, 2), math.nan), lambda: np.full((3, 2), math.inf), lambda: np.ones((3, 2), dtype=complex),
              lambda: np.array([["a", "b"]]), lambda: np.array([None, 1], dtype=object), lambda: np.ones((3, 2), dtype=bool), lambda: np.ones((2, 2, 2)),
              lambda: np.full((3, 2), 1e300), lambda: np.zeros((3, 2)), lambda: np.ones((3, 2)).astype("datetime64[s]"), *TENSORS, *JUNK],
    "model or pairs": [list, lambda: [(torch.ones(3, 5), torch.ones(3))], lambda: [(torch.ones(3, 5).double(), None), (torch.ones(1, 4).double(), None)], lambda: [None],
                       lambda: [(torch.full((1, 5), math.nan), None)], lambda: [(torch.ones(1, 5, device="meta"), None)], lambda: [(torch.ones(1, 5), "bias")], lambda: [(3, 4)]],
    "groups": [lambda: 3, lambda: "text", list, lambda: [[0], []], lambda: [0, 0], lambda: [0, 2], lambda: [-1, 0], lambda: [0.5, 1], lambda: [True, 0], lambda: None, lambda: [[0, 1], None],
               lambda: [10**30, 0], dict, lambda: [nested(500), 1], lambda: [torch.tensor(0), 1], lambda: np.arange(4), lambda: {0, 1}, lambda: [0]],
    "graph": [lambda: None, lambda: 3, lambda: "text", dict, lambda: nn.Linear(5, 1), lambda: object()],
    "edges": [dict, lambda: None, lambda: 3, lambda: {"a": 1.0}, lambda: {("x", "y"): "a"}, lambda: {("x", "y"): math.nan}, lambda: {("x", "y", "z"): 1.0}, lambda: {("x", "x"): 1.0}, list,
              lambda: {("x", "y"): None}, lambda: {("x", "y"): 10**400}],
    "schedule": [lambda: 0, lambda: -1, lambda: 1.5, lambda: "often", lambda: True, list, lambda: object(), lambda: probes.Every, lambda: math.nan, lambda: 10**30, lambda: [3]],
    "numbers or none": [list, lambda: [-1], lambda: ["a"], lambda: 3, lambda: [10**30], lambda: [1.5], lambda: "text", lambda: object(), lambda: [math.nan]],
    "text": [lambda: 3, lambda: None, lambda: "", lambda: "\0", lambda: b"x", lambda: object(), list, lambda: "a" * 5000, lambda: "../x", lambda: "/etc/passwd", lambda: "x\ny", lambda: math.nan],
    "module name": [lambda: 3, lambda: None, lambda: "", lambda: "nothing", lambda: "nothing:f", lambda: "os:nothing", lambda: "math:pi", lambda: ":", lambda: "a:b:c", lambda: "builtins:print",
                    lambda: object(), lambda: b"x", lambda: "\0:x", lambda: "os:getcwd", lambda: "torch.nn:Linear"],
    "state": [lambda: None, lambda: 3, lambda: {"a": object()}, lambda: {1: 2}, lambda: [1], lambda: {"a": lambda: 1}, lambda: {"a": torch.ones(2, device="meta")}, lambda: {"": torch.ones(1)},
              lambda: {"a": torch.ones(2).to_sparse()}, lambda: {"a": 1j}, lambda: {"a": {"b": {1, 2}}}, lambda: {"a": b"x"}, lambda: {"a": math.nan}],
    "stored": [lambda: None, lambda: 3, dict, lambda: {"values": "a"}, lambda: {"values": [math.nan], "norm": "2"}, lambda: {"values": [1.0]}, lambda: [1], lambda: {"values": [], "norm": "9"}],
    "config": [lambda: None, lambda: 3, dict, list, lambda: {"data": 3}, lambda: {"data": {"name": "moons"}}, lambda: {"data": {"name": "moons"}, "model": {"name": 3}}, lambda: {1: 2},
               lambda: {"data": {"name": "moons"}, "model": {"name": "mlp"}, "epochs": -1}, lambda: {"data": {"name": "moons"}, "model": {"name": "mlp"}, "nothing": 1},
               lambda: {"data": {"name": "moons", "seed": 10**30}, "model": {"name": "mlp"}, "epochs": 10**30, "optimizer": {"name": "sgd", "lr": math.nan}}],
    "margins": [lambda: None, lambda: 3, lambda: [1.0], lambda: torch.ones(3), lambda: "text", lambda: excite.Margins, lambda: object()],
    "points": [lambda: None, lambda: 3, dict, lambda: (torch.ones(2), torch.ones(2)), lambda: object(), lambda: _dataset(_inputs(0)), lambda: _dataset(_with(math.nan)), lambda: _dataset(_inputs()[:, :3]),
               lambda: _dataset(_inputs().to("meta")), lambda: _dataset(_inputs().to_sparse()), lambda: _dataset(_inputs().float()), lambda: _dataset(_inputs(), torch.full((8,), 7)),
               lambda: _dataset(_inputs(), torch.zeros(3)), lambda: _dataset(None), lambda: _dataset(_inputs(), torch.full((8,), math.nan)), lambda: _dataset(_inputs().to(torch.complex128))],
    "dropout run": [lambda: None, lambda: 3, lambda: nn.Linear(5, 1), lambda: "text", lambda: object(), dict],
    "models": [list, lambda: None, lambda: 3, lambda: [3], lambda: network(), lambda: [filled(math.nan)], lambda: [nn.Linear(3, 1).double()], lambda: [Raises(KeyError("key"))], lambda: [network().half()],
               lambda: [nn.Identity()], lambda: [perceptron(), nn.Linear(5, 2).double()], lambda: "text", lambda: [None], lambda: [perceptron().to("meta")], lambda: [nn.LazyLinear(1)]],
    "pairs of tensors": [lambda: None, lambda: 3, lambda: (None, None), lambda: (_inputs(),), lambda: (_inputs(), torch.zeros(3)), lambda: (_with(math.nan), _labels()), lambda: (_inputs()[:, :3], _labels()),
                         lambda: "ab", lambda: (_inputs().to("meta"), _labels())],
    "rates": [lambda: -1, lambda: 0, lambda: math.nan, lambda: [0.1], list, lambda: "a", lambda: None, lambda: torch.ones(3), lambda: True, lambda: 10**400, lambda: [0.1, "a"], dict, lambda: math.inf],
    "names": [lambda: 3, lambda: None, list, lambda: "", lambda: object(), lambda: ["*"], lambda: "["],
    "action": [lambda: 3, lambda: None, lambda: "shout", list, lambda: object()],
    "rules": [lambda: 3, lambda: None, lambda: [3], lambda: "loss", lambda: [alerts.Above], dict, lambda: [None]],
    "paths": [lambda: 3, lambda: None, list, lambda: ["/nowhere"], lambda: "/nowhere", lambda: [3], lambda: ["\0"], lambda: [b"x"], dict, lambda: ["a" * 5000]],
    "mode": [lambda: "w", lambda: 3, lambda: None, list, lambda: "", lambda: "ra", lambda: b"r"],
    "status": [lambda: "done", lambda: 3, list, lambda: "", lambda: object(), dict],
}  # fmt: skip
HOSTILE["model or pairs"] += HOSTILE["model"]
HOSTILE["optional x"], HOSTILE["optional y"] = (HOSTILE[role] for role in "xy")


# -- calls -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Call:
    """`function(**arguments)`; `arguments` are (role, a valid value) by name. `trains`: part of the training step."""

    function: Callable[..., Any]
    arguments: dict[str, tuple[str, Callable[[], Any]]]
    trains: bool = False


def _labels() -> Tensor:
    return torch.arange(8) % 2


def descent_of(model: Any) -> torch.optim.Optimizer:
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
    "step_size": ("number", lambda: None), "random_start": ("flag", lambda: False), "layers": ("layers", lambda: "all"),
    "hidden_radius": ("rates", lambda: 0.01), "hidden": ("number", lambda: None), "awp": ("number", lambda: 0.0), "trades": ("number", lambda: 0.0),
    "keep_best": ("flag", lambda: False), "held_out": ("pairs of tensors", lambda: None),
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


def _probed(kind: Any, model: Any, x: Any, **options: Any) -> None:
    """Two steps of a training that one probe watches."""
    probe = kind(**options)
    with excite.watch(model, x, None, None, [probe], strict=True) as watching:
        for _ in range(2):
            with contextlib.suppress(Exception):  # the training is the user's
                model(_inputs()).square().mean().backward()
            watching.step(0.5)


def _probe(kind: Any, **arguments: tuple[str, Callable[[], Any]]) -> Call:
    schedule = ("schedule", lambda: None)
    return Call(
        lambda **given: _probed(kind, **given), {"model": PLAIN, "x": X, "schedule": schedule, **arguments}, True
    )


class _Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + torch.relu(y.transpose(1, 2).flatten(2))


def _vital(kind: Any, **options: Any) -> None:
    """Two steps of a small transformer that one probe watches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(5, 8), _Attention(), torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 5)
    )
    optimizer, ids = torch.optim.Adam(model.parameters()), torch.randint(5, (3, 4))
    probe = kind(**options)
    with excite.watch(model, ids, None, optimizer, [probe], strict=True) as watching:
        for _ in range(2):
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            optimizer.step()
            watching.step(0.5)


def _sign(kind: Any, **arguments: tuple[str, Callable[[], Any]]) -> Call:
    return Call(lambda **given: _vital(kind, **given), {"schedule": ("schedule", lambda: None), **arguments})


def _run_method(name: str) -> Callable[..., Any]:
    """The method of a run with two steps and a checkpoint."""

    def function(**given: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder, excite.Run.create(Path(folder) / "run", {}) as run:
            for step in range(3):
                run.log(step, {"a": float(step)})
            run.write_json("a", 1)
            run.save_checkpoint(1, {"w": torch.ones(2)})
            found = getattr(run, name)(**given)
            if name == "patience":
                with found:
                    run.log(9, {"a": 1.0})
            run.flush()

    return function


def _opened(path: Any, mode: Any, keep: Any) -> None:
    excite.Run.open(path, mode, keep=keep).close()


def _created(config: Any, resume: Any, keep: Any, name: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / name.replace("..", "").lstrip("/")) if isinstance(name, str) else name
        excite.Run.create(path, config, resume=resume, keep=keep).close()


def _kept(model: Any, x: Any, **options: Any) -> None:
    """Two steps of a training with the probe of the conserved quantities."""
    descent = descent_of(model) if isinstance(model, nn.Module) and any(True for _ in model.parameters()) else None
    with excite.watch(model, x, None, descent, [probes.Conservation(**options)], strict=True) as watching:
        for _ in range(2):
            with contextlib.suppress(Exception):  # the training is the user's
                model(_inputs()).square().mean().backward()
                descent.step()
            watching.step(0.5)


def _margin_probe(x: Any, y: Any, schedule: Any, **options: Any) -> None:
    with excite.watch(
        network(norm=False), None, None, None, [probes.Margin(x, y, schedule, **options)], strict=True
    ) as watching:
        watching.step(0.5)


def _processes(**given: Any) -> None:
    with fit.many_processes(**given):
        pass


def _advanced(kind: Any, model: Any, radius: Any, fraction: Any) -> None:
    kind(model, radius).advance(fraction)


def _distances() -> excite.Margins:
    return excite.Margins(torch.linspace(0, 1, 8).double(), "2")


def _moments(x: Any, **options: Any) -> Any:
    moments = probes.Moments(**options)
    moments.add(x)
    return moments.covariance()


def _fitted(model: Any, points: Any, loss: Any, optimizer: Any, **options: Any) -> Any:
    return fit.fit(model, points, fit.squared_error(model) if loss is None else loss, optimizer, **options)


def _square(model: Any) -> Tensor:
    return model(torch.ones(2, 5).double()).square().mean()


def _made(**given: Any) -> Any:
    return type(fit.make_model(**given))


PAIRS, NONE = ("model or pairs", lambda: network(norm=False)), ("flag", lambda: None)
STABLE = {
    "descent": ("number", lambda: 0.1),
    "form": ("choice", lambda: "unit"),
    "loss": ("choice", lambda: "half-sum"),
    "tolerance": ("number", lambda: 1e-4),
}
SERIES, ROWS = ("numbers", lambda: [1.0, 0.5, 0.2]), ("array", lambda: np.random.default_rng(0).normal(size=(6, 2)))
CODES, LINEAR = (
    ("y", lambda: np.arange(6) % 2),
    ("weights", lambda: [torch.randn(3, 2).double(), torch.randn(1, 3).double()]),
)
LOSS = ("function", lambda: _square)


def _loaded(model: Any, x: Any, y: Any, batches: Any, norm: Any) -> Any:
    quick = SearchOptions(steps=3, restarts=1, evidence=False, certify=False)
    return loader_margins(model, [(x, y)], batches=batches, norm=norm, options=quick)


CALLS: dict[str, Call] = {
    "trace": Call(lambda **given: str(excite.trace(**given)), {"model": MODEL, "example": X, "output": PICK}),
    **{f"PersistentExcitation.{name}": Call(_method(excite.PersistentExcitation, name), {"model": MODEL, "x": X, **({"y": Y} if name.startswith("loss") else {}), **SETTING}, name.startswith("loss")) for name in ("loss", "extremes", "predict", "perturbations")},
    **{f"AdversarialTraining.{name}": Call(_method(excite.AdversarialTraining, name), {"model": MODEL, "x": X, **({} if name == "predict" else {"y": Y}), **ATTACK}, name == "loss") for name in ("loss", "perturbations", "predict")},
    "margins": Call(excite.margins, {
        "model": MODEL, "x": X, "y": Y, "norm": NORM, "bounds": ("bounds", lambda: None), "threshold": ("number", lambda: 0.5), "output": PICK,
        "steps": ("count", lambda: 3), "restarts": ("count", lambda: 1), "evidence": ("flag", lambda: False), "certify": ("flag", lambda: False),
        "lipschitz": ("number", lambda: None), "batch": ("count", lambda: 8), "seed": ("seed", lambda: 0), "layers": ("layers", lambda: "input"),
        "relative": ("flag", lambda: False), "perturbations": ("flag", lambda: False)}),
    "SearchOptions": Call(SearchOptions, {
        "steps": ("count", lambda: 3), "restarts": ("count", lambda: 1), "evidence": ("flag", lambda: False), "certify": ("flag", lambda: False),
        "lipschitz": ("number", lambda: None), "seed": ("seed", lambda: 0), "seconds": ("number", lambda: 60.0)}),
    "smoothed_margins": Call(smoothed_margins, {
        "model": MODEL, "x": X, "y": Y, "sigma": ("number", lambda: 0.2), "samples": ("count", lambda: 20), "selection": ("count", lambda: 5),
        "level": ("number", lambda: 0.9), "threshold": ("number", lambda: 0.5), "output": PICK, "batch": ("count", lambda: 8), "seed": ("seed", lambda: 0)}),
    "loader_margins": Call(_loaded, {"model": MODEL, "x": X, "y": Y, "batches": ("count", lambda: 1), "norm": NORM}),
    "HiddenOptions": Call(HiddenOptions, {"norm": NORM, "budget": ("choice", lambda: "layer"), "random_start": ("flag", lambda: False)}),
    "studies.judge_again": Call(studies.judge_again, {"study": ("text", lambda: "margin-losses"), "file": ("path", lambda: "nowhere"), "scale": ("text", lambda: None)}),
    "studies.plan_seeds": Call(studies.plan_seeds, {"study": ("text", lambda: "margin-losses"), "file": ("path", lambda: "nowhere"), "scale": ("text", lambda: None), "power": ("number", lambda: 0.8)}),
    "studies.find_study": Call(studies.find_study, {"reference": ("text", lambda: "margin-losses")}),
    "robust_accuracy": Call(robust_accuracy, {
        "model": MODEL, "x": X, "y": Y, "radii": ("radii", lambda: [0.0, 0.1]), "norm": NORM, "bounds": ("bounds", lambda: None), "classes": ("classes", lambda: None),
        "threshold": ("number", lambda: 0.5), "steps": ("count", lambda: 2), "restarts": ("count", lambda: 1), "batch": ("count", lambda: 8), "seed": ("seed", lambda: 0)}),
    "watch": Call(_watched, {"model": MODEL, "x": X, "loss": ("number", lambda: 0.5), "optimizer": ("optimizer", lambda: None), "probes": ("probes", lambda: None),
                             "every": ("count", lambda: None), "output": PICK, "alerts": ("probes", lambda: None), "margin_batch": ("x", lambda: None), "strict": ("flag", lambda: True)}, True),
    "lipschitz.local": Call(lipschitz.local, {"model": MODEL, "x": X, "norm": NORM, "output": PICK}),
    "lipschitz.bound": Call(lipschitz.bound, {"model": MODEL, "example": X, "norm": NORM, "output": PICK}),
    "lipschitz.largest": Call(lipschitz.largest, {"model": MODEL, "x": X, "radius": ("number", lambda: 0.1), "norm": NORM, "ball": NORM, "bounds": ("bounds", lambda: None),
                                                  "rounds": ("count", lambda: 2), "places": ("count", lambda: 8), "seed": ("seed", lambda: 0), "output": PICK}),
    "lipschitz.from_embeddings": Call(lipschitz.from_embeddings, {
        "model": ("model", lambda: GPT(9, 8, 1, 2, 5)), "ids": ("x", lambda: torch.zeros(2, 5, dtype=torch.long)), "embedding": ("text", lambda: None)}),
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
    "probes.conservation": Call(_conserved, {"model": MODEL, "optimizer": ("optimizer", lambda: descent_of), "x": X, "output": PICK, "off_diagonal": ("flag", lambda: False), "tolerance": ("number", lambda: None)}),
    "probes.effective_rank": Call(probes.effective_rank, {"rows": X}),
    "probes.smallest_eigenvalue": Call(probes.smallest_eigenvalue, {"matrix": ("x", lambda: torch.eye(3).double()), "tolerance": ("number", lambda: None), "accuracy": ("number", lambda: 1e-4)}),
    "probes.distance": Call(probes.distance, {"parameters": ("weights", lambda: [_inputs()]), "initial": ("weights", lambda: [_inputs()])}),
    "probes.angle": Call(probes.angle, {"one": ("weights", lambda: [_inputs()]), "other": ("weights", lambda: [_inputs()])}),
    "probes.sign_changes": Call(probes.sign_changes, {"before": ("weights", lambda: [_inputs()]), "after": ("weights", lambda: [_inputs()])}),
    "probes.consistency": Call(probes.consistency, {"patterns": ("x", lambda: torch.ones(2, 3, 4) > 0), "slopes": ("x", lambda: torch.ones(2, 3))}),
    "wiring.path_count": Call(wiring.path_count, {"model": MODEL, "example": X, "biases": ("flag", lambda: False), "output": PICK}),
    "wiring.piecewise_linear": Call(wiring.piecewise_linear, {"model": ("model", lambda: torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))), "x": X}),
    "wiring.fully_connected": Call(wiring.fully_connected, {"weights": ("weights", lambda: [torch.ones(3, 5), torch.ones(1, 3)])}),
    "bounds.deep_lipschitz": Call(bounds.deep_lipschitz, {"model": PLAIN, "x": X, "y": Y, "descent": ("number", lambda: 0.1), "form": ("choice", lambda: "unit"), "loss": ("choice", lambda: "half-sum"), "tolerance": ("number", lambda: 1e-4)}),
    "bounds.two_layer_lipschitz": Call(bounds.two_layer_lipschitz, {"model": PLAIN, "x": X, "y": Y, "descent": ("number", lambda: 0.1), "form": ("choice", lambda: "unit"), "loss": ("choice", lambda: "half-sum"), "tolerance": ("number", lambda: 1e-4)}),
    "bounds.linear_margin": Call(bounds.linear_margin, {"x": X, "y": Y, "angle": ("number", lambda: 0.1)}),
    "bounds.count_laws": Call(bounds.count_laws, {"model": PLAIN, "example": X, "loss": ("choice", lambda: "any"), "output": PICK, "limit": ("count", lambda: 100)}),
    "bounds.covering_number": Call(bounds.covering_number, {"x": X, "radius": ("number", lambda: 0.5)}),
    "bounds.steadiness": Call(bounds.steadiness, {"updates": ("numbers", lambda: [1.0, 0.5]), "fraction": ("number", lambda: 0.5)}),
    "bounds.steady_lipschitz": Call(bounds.steady_lipschitz, {"updates": ("numbers", lambda: [1.0, 0.5]), "sigma": ("number", lambda: 1.0), "points": ("count", lambda: 5), "tau": ("count", lambda: 0), "confidence": ("number", lambda: 0.9)}),
    "bounds.trajectory_length": Call(bounds.trajectory_length, {name: ("numbers", lambda: [1.0, 0.5, 0.2]) for name in ("lipschitz", "largest", "smallest")}),
    "bounds.radius_of_penalty": Call(bounds.radius_of_penalty, {"x": X, "y": ("y", lambda: torch.randn(8)), "penalty": ("number", lambda: 0.1), "norm": NORM}),
    "bounds.alignment": Call(bounds.alignment, {"weights": ("weights", lambda: [torch.randn(3, 5), torch.randn(1, 3)])}),
    "bounds.sharpness": Call(bounds.sharpness, {"model": PLAIN, "loss": ("function", lambda: lambda model: model(torch.ones(2, 5).double()).square().mean()), "max_restarts": ("count", lambda: 20), "seed": ("seed", lambda: 0)}),
    "bounds.reduced_alignment": Call(bounds.reduced_alignment, {"model": PLAIN, "example": X, "tolerance": ("number", lambda: 1e-3), "output": PICK}),
    "load_run": Call(excite.load_run, {"path": ("path", lambda: "/nowhere")}),
    "broken_at": Call(broken_at, {"model": MODEL, "x": X, "y": Y, "radii": ("radii", lambda: (0.0, 0.1)), "norm": NORM, "steps": ("count", lambda: 2), "progress": ("function", lambda: None)}),
    **{f"{kind.__name__}.advance": Call(lambda kind=kind, **given: _advanced(kind, **given), {"model": MODEL, "radius": ("number", lambda: excite.Stages(0.1)), "fraction": ("number", lambda: 0.5)}) for kind in (excite.PersistentExcitation, excite.AdversarialTraining)},
    "Relative": Call(excite.Relative, {"factor": ("number", lambda: 0.1)}),
    "Stages": Call(excite.Stages, {"radius": ("number", lambda: 0.1), "n": ("count", lambda: 4)}),
    "Hierarchy": Call(lambda groups: str(excite.Hierarchy(groups)), {"groups": ("groups", lambda: [[0, 1], 2])}),
    "Hierarchy.balanced": Call(excite.Hierarchy.balanced, {"classes": ("classes", lambda: 3)}),
    "Hierarchy.by_means": Call(excite.Hierarchy.by_means, {"x": X, "y": Y, "classes": ("classes", lambda: 2)}),
    "Hierarchy.descend": Call(lambda right: excite.Hierarchy([0, 1, 2]).descend(right), {"right": ("x", lambda: torch.ones(4, 2) > 0)}),
    "Margins.within": Call(lambda eps: _distances().within(eps), {"eps": ("radii", lambda: 0.1)}),
    "Margins.quantile": Call(lambda q: _distances().quantile(q), {"q": ("number", lambda: 0.5)}),
    "Margins.gap": Call(lambda **given: _distances().gap(**given), {"other": ("margins", _distances), "level": ("number", lambda: 0.9), "resamples": ("count", lambda: 10), "seed": ("seed", lambda: 0)}),
    "Margins.from_dict": Call(excite.Margins.from_dict, {"stored": ("stored", lambda: _distances().to_dict())}),
    "probes.smallest_eigenvalues": Call(lambda matrices, **given: probes.smallest_eigenvalues([matrices], **given), {"matrices": ("x", lambda: torch.eye(3).double()), "tolerance": ("number", lambda: None), "accuracy": ("number", lambda: 1e-4), "points": ("numbers or none", lambda: None)}),
    "probes.Moments": Call(_moments, {"x": X, "width": ("count", lambda: 5), "exact": ("count", lambda: 1024), "sketch": ("count", lambda: 4), "block": ("count", lambda: None)}),
    "probes.default_probes": Call(probes.default_probes, {"output": ("pick", lambda: None)}),
    "probes.Every": Call(probes.Every, {"n": ("count", lambda: 3)}),
    "probes.Budget": Call(probes.Budget, {"fraction": ("number", lambda: 0.03), "max_steps": ("count", lambda: 1000)}),
    "probes.PaidSchedule": Call(probes.PaidSchedule, {"fraction": ("number", lambda: 0.03), "advance": ("number", lambda: 1.8)}),
    "probes.MarginGap": _probe(probes.MarginGap, train=("pairs of tensors", lambda: (_inputs(), _labels())), test=("pairs of tensors", lambda: (_inputs(), _labels()))),
    "train.zero_momentum": Call(fit.zero_momentum, {"optimizer": ("optimizer", lambda: torch.optim.SGD(network().parameters(), 0.1, momentum=0.9, dampening=0.9))}),
    "probes.Loss": _probe(probes.Loss),
    "probes.Distance": _probe(probes.Distance),
    "probes.GradientNorm": _probe(probes.GradientNorm),
    "probes.UpdateRatio": _probe(probes.UpdateRatio),
    "probes.AdamMoments": _sign(probes.AdamMoments),
    "probes.AttentionLogits": _sign(probes.AttentionLogits),
    "probes.AttentionSpectrum": _sign(probes.AttentionSpectrum, output=PICK),
    "probes.DeadUnits": _sign(probes.DeadUnits),
    "probes.ResidualStream": _sign(probes.ResidualStream),
    "probes.LogNormalizer": _sign(probes.LogNormalizer, output=PICK),
    "probes.TokenRank": _sign(probes.TokenRank, sequences=("count", lambda: 2)),
    "probes.CriticalSharpness": _sign(probes.CriticalSharpness, loss=("function", lambda: None)),
    "probes.FlightRecorder": Call(lambda **given: _vital(probes.FlightRecorder, **given), {"steps": ("count", lambda: 200), "recent": ("count", lambda: 5), "past": ("count", lambda: 20), "sigmas": ("number", lambda: 6.0), "least": ("number", lambda: 0.05), "warn": ("flag", lambda: True), "residual": ("flag", lambda: True)}),
    "probes.vital_signs": Call(lambda **given: [one.name for one in probes.vital_signs(**given)], {"every": ("count", lambda: 10), "output": ("pick", lambda: None)}),
    "probes.Direction": _probe(probes.Direction, window=("count", lambda: 2)),
    "probes.Signs": _probe(probes.Signs, window=("count", lambda: 2)),
    "probes.Rank": _probe(probes.Rank, max_rows=("count", lambda: 8), units=("flag", lambda: False)),
    "probes.Alignment": _probe(probes.Alignment, exact=("count", lambda: 8), output=PICK),
    "probes.Consequences": _probe(probes.Consequences, batch=("count", lambda: None), epsilon=("number", lambda: 0.1), max_width=("count", lambda: 1024), output=PICK),
    "probes.Consistency": _probe(probes.Consistency, output=PICK),
    "probes.Trajectory": _probe(probes.Trajectory, layers=("layers", lambda: "first"), output=PICK, link=("choice", lambda: "identity"), passes=("choice", lambda: "all"), bounds_every=("count", lambda: None), max_samples=("count", lambda: None), clean=("schedule", lambda: None)),
    "probes.Margin": Call(_margin_probe, {"x": X, "y": Y, "schedule": ("schedule", lambda: None), "steps": ("count", lambda: 2), "norm": NORM}),
    "probes.Conservation": Call(_kept, {"model": PLAIN, "x": X, "schedule": ("schedule", lambda: None), "parts": ("flag", lambda: True), "output": PICK, "off_diagonal": ("flag", lambda: False), "tolerance": ("number", lambda: None)}, True),
    "wiring.cuts": Call(wiring.cuts, {"groups": ("weights", lambda: excite.trace(network(norm=False), _inputs()).groups)}),
    "wiring.Graph": Call(wiring.Graph, {"inputs": ("names", lambda: ("x",)), "output": ("text", lambda: "y"), "weights": ("edges", lambda: {("x", "y"): 1.0}), "slopes": ("edges", dict)}),
    "wiring.decompose": Call(wiring.decompose, {"graph": ("graph", lambda: wiring.fully_connected([torch.ones(2, 2), torch.ones(1, 2)])), "limit": ("count", lambda: 100)}),
    "bounds.Descent": Call(bounds.Descent, {"step": ("number", lambda: 0.1), "momentum": ("number", lambda: 0.5), "dampening": ("number", lambda: 0.0), "nesterov": ("flag", lambda: False)}),
    "bounds.bias_distance": Call(bounds.bias_distance, {**dict.fromkeys(("rates", "errors", "lipschitz", "smallest", "updates"), SERIES), "sgd": NONE}),
    "bounds.bias_variance": Call(bounds.bias_variance, {**dict.fromkeys(("rates", "errors", "lipschitz", "sigma"), SERIES), "form": ("choice", lambda: "tight"), "sgd": NONE}),
    "bounds.cross_entropy_rank": Call(bounds.cross_entropy_rank, {"weights": LINEAR, "x": ROWS, "y": CODES, "initial": ("weights", lambda: None), "tolerance": ("number", lambda: 0.1)}),
    "bounds.decay_rank": Call(bounds.decay_rank, {"weights": LINEAR, "decay": ("rates", lambda: 0.1), "x": ROWS, "y": CODES, "tolerance": ("number", lambda: 1e-3)}),
    "bounds.deep_norms": Call(bounds.deep_norms, {"model": PAIRS, "x": X, "y": Y, **STABLE}),
    "bounds.two_layer_margin": Call(bounds.two_layer_margin, {"model": PAIRS, "x": X, "y": Y, **STABLE, "seconds": ("number", lambda: 1.0)}),
    "bounds.descent_stability": Call(bounds.descent_stability, {"model": PLAIN, "loss": LOSS, "descent": ("number", lambda: 0.1), "tolerance": ("number", lambda: None), "max_restarts": ("count", lambda: 20), "seed": ("seed", lambda: 0)}),
    "bounds.directional_lipschitz": Call(bounds.directional_lipschitz, {"hidden_weight": ("array", lambda: np.ones((3, 2))), "hidden_bias": ("numbers", lambda: [0.1, 0.2, 0.3]), "output_weight": ("numbers", lambda: [1.0, -1.0, 0.5]), "x": ROWS, "y": CODES, "support": ("number", lambda: 0.2), "kink": ("number", lambda: 0.01), "residual": ("number", lambda: 0.1)}),
    "bounds.dropout_generalization": Call(bounds.dropout_generalization, {"run": ("dropout run", lambda: fit.train_with_dropout(perceptron(), _inputs(), _labels(), 20, 0.01, tail=10, looks=2)), "x": X, "new": X, "delta": ("number", lambda: 0.05), "radius": ("number", lambda: None), "limit": ("count", lambda: 10), "seed": ("seed", lambda: 0)}),
    "bounds.empty_region": Call(bounds.empty_region, {"model": PAIRS, "x": X, "phi": ("rates", lambda: None), "new": X, "beta": ("number", lambda: None), "gamma": ("number", lambda: None), "mu": ("number", lambda: None), "sigmoid": NONE, "form": ("choice", lambda: "stated"), "limit": ("count", lambda: 10)}),
    "bounds.first_layer_lipschitz": Call(bounds.first_layer_lipschitz, {**dict.fromkeys(("weight_updates", "bias_updates", "biases"), SERIES), "beta": ("number", lambda: 0.1), "delta": ("number", lambda: 0.1), "unit": NONE, "sgd": NONE, "drawn": ("numbers or none", lambda: [0, 1, 1]), "points": ("count", lambda: 2)}),
    "bounds.linear_margin_any_time": Call(bounds.linear_margin_any_time, {"x": ROWS, "y": CODES, "weight": ("numbers", lambda: [1.0, 0.5]), "bias": ("number", lambda: 0.1), "initial_weight": ("numbers", lambda: [0.1, 0.1]), "initial_bias": ("number", lambda: 0.0)}),
    "bounds.relaxed_linear_margin": Call(bounds.relaxed_linear_margin, {"x": ROWS, "y": CODES, "directions": ("array", lambda: np.eye(2)), "offsets": ("numbers", lambda: [1.0, 1.0])}),
    "bounds.matrix_equivalence": Call(bounds.matrix_equivalence, {"x": ROWS, "y": ("array", lambda: np.ones((6, 2))), "penalty": ("number", lambda: 0.1), "norm": NORM, "output_norm": NORM}),
    "bounds.penalty_of_radius": Call(bounds.penalty_of_radius, {"x": ROWS, "y": ("numbers", lambda: [1.0, 2.0, 0.5, 0.1, 0.2, 0.3]), "radius": ("number", lambda: 0.1), "norm": NORM, "power": ("number", lambda: 2.0)}),
    "bounds.most_active": Call(bounds.most_active, {"V": ("array", lambda: np.eye(3, 2)), "b": ("numbers", lambda: np.ones(3)), "weights": ("numbers", lambda: None), "seconds": ("number", lambda: 1.0)}),
    "data.load": Call(lambda **given: data.load(**given), {"name": ("text", lambda: "moons"), "train": ("count", lambda: 10), "test": ("count", lambda: 4), "seed": ("seed", lambda: 0), "noise": ("number", lambda: 0.1)}),
    "data.load digits": Call(lambda **given: data.load("digits", **given), {"classes": ("groups", lambda: (0, 1)), "train": ("count", lambda: 10), "scale": ("range", lambda: (-1, 1)), "seed": ("seed", lambda: 0)}),
    "data.cache_folder": Call(data.cache_folder, {"root": ("path", lambda: "/tmp")}),
    "data.fetch": Call(lambda name: data.fetch(name), {"name": ("text", lambda: "nothing")}),
    "fit.accuracy": Call(fit.accuracy, {"model": PLAIN, "predict": ("function", lambda: excite.PersistentExcitation(network(norm=False), 0.1).predict), "x": X, "y": Y, "max_points": ("count", lambda: None)}, True),
    "fit.build": Call(lambda **given: type(fit.build(**given)), {"name": ("text", lambda: "mlp"), "seed": ("seed", lambda: 0), "inputs": ("count", lambda: 3), "outputs": ("count", lambda: 1)}),
    "fit.make_model": Call(_made, {"name": ("module name", lambda: "mlp"), "seed": ("seed", lambda: 0), "inputs": ("count", lambda: 3)}),
    "fit.import_factory": Call(lambda name: type(fit.import_factory(name)), {"name": ("module name", lambda: "torch.nn:Linear")}),
    "fit.squared_error": Call(lambda model, output, x, y: fit.squared_error(model, output)(x, y), {"model": PLAIN, "output": PICK, "x": X, "y": Y}, True),
    "fit.descent": Call(fit.descent, {"model": PLAIN, "loss": LOSS, "steps": ("count", lambda: 2), "step": ("number", lambda: 0.01), "refresh": ("count", lambda: 1), "every": ("count", lambda: 1), "tolerance": ("number", lambda: 0.0), "quantities": ("metrics", lambda: {"a": _square})}),
    "fit.gradient_flow": Call(fit.gradient_flow, {"model": PLAIN, "loss": LOSS, "time": ("number", lambda: 0.1), "at": ("radii", lambda: 2), "clock": ("choice", lambda: "time"), "method": ("choice", lambda: "RK45"), "rtol": ("number", lambda: 1e-3), "atol": ("number", lambda: 1e-3), "tolerance": ("number", lambda: 0.0), "max_steps": ("count", lambda: 50)}),
    "fit.ensemble": Call(fit.ensemble, {"models": ("models", lambda: [perceptron(0), perceptron(1)]), "x": X, "y": Y, "epochs": ("count", lambda: 1), "batch": ("count", lambda: 4), "lr": ("rates", lambda: 0.01), "loss": ("choice", lambda: "half-squared"), "momentum": ("number", lambda: 0.0), "weight_decay": ("number", lambda: 0.0), "seeds": ("numbers or none", lambda: None), "test": ("pairs of tensors", lambda: None), "window": ("count", lambda: None), "layers": ("choice", lambda: "first")}, True),
    "fit.fit": Call(_fitted, {"model": PLAIN, "points": ("points", lambda: _dataset(_inputs())), "loss": ("function", lambda: None), "optimizer": ("optimizer", lambda: descent_of), "epochs": ("count", lambda: 1), "batch": ("count", lambda: 4), "seed": ("seed", lambda: 0), "checkpoint_every": ("text", lambda: "1 epoch"), "predict": ("function", lambda: None), "capture": ("flag", lambda: True)}, True),
    "fit.train_with_dropout": Call(fit.train_with_dropout, {"model": ("model or pairs", perceptron), "x": X, "y": Y, "steps": ("count", lambda: 5), "lr": ("number", lambda: 0.01), "where": ("choice", lambda: "end"), "tail": ("count", lambda: 3), "decay": ("number", lambda: 1.0), "measurements": ("count", lambda: 2), "seed": ("seed", lambda: 0)}),
    "fit.many_processes": Call(_processes, {"device": ("text", lambda: "cpu"), "wait": ("number", lambda: 1.0)}),
    **{f"alerts.{kind.__name__}": Call(kind, {"names": ("names", lambda: "loss/*"), "then": ("action", lambda: "log"), **options}) for kind, options in {
        alerts.Above: {"limit": ("number", lambda: 1.0), "measurements": ("count", lambda: 1)}, alerts.Below: {"limit": ("number", lambda: 1.0), "measurements": ("count", lambda: 1)}, alerts.NotFinite: {},
        alerts.Fell: {"fraction": ("number", lambda: 0.25), "measurements": ("count", lambda: 3), "min_peak": ("number", lambda: 4.0)},
        alerts.SteeperWhileFlat: {"factor": ("number", lambda: 2.0), "window": ("count", lambda: 500), "flat": ("number", lambda: 0.02), "loss": ("text", lambda: "loss/step"), "measurements": ("count", lambda: 5)}}.items()},
    "config.parse_config": Call(lambda values: parse_config(values), {"values": ("config", lambda: {"data": {"name": "moons"}, "model": {"name": "mlp", "options": {"inputs": 2}}, "epochs": 1, "batch": 5, "optimizer": {"name": "sgd", "lr": 0.1}})}),
    "report.make_report": Call(lambda paths: report.make_report(paths), {"paths": ("paths", lambda: ["/nowhere"])}),
    "studies.run": Call(studies.run, {"name": ("text", lambda: "margin-layers"), "scale": ("text", lambda: "nothing"), "seeds": ("count", lambda: 1), "out": ("path", lambda: None), "workers": ("count", lambda: 1)}),
    "runs.read_checkpoint": Call(runs.read_checkpoint, {"path": ("path", lambda: "/nowhere")}),
    "runs.repair": Call(runs.repair, {"path": ("path", lambda: "/nowhere"), "dry_run": ("flag", lambda: True)}),
    "Run.create": Call(_created, {"name": ("text", lambda: "run"), "config": ("json", dict), "resume": ("flag", lambda: False), "keep": ("count", lambda: 2)}),
    "Run.open": Call(_opened, {"path": ("path", lambda: "/nowhere"), "mode": ("mode", lambda: "r"), "keep": ("count", lambda: 2)}),
    **{f"Run.{name}": Call(_run_method(name), arguments) for name, arguments in {
        "set_status": {"status": ("status", lambda: "running"), "reason": ("text", lambda: "why")}, "rewind": {"step": ("count", lambda: 1)}, "thin": {"before": ("count", lambda: 2), "every": ("count", lambda: 2)},
        "series": {"name": ("text", lambda: "a")}, "save_checkpoint": {"step": ("count", lambda: 5), "state": ("state", lambda: {"a": torch.ones(2)}), "final": ("flag", lambda: False)},
        "load_checkpoint": {"step": ("count", lambda: 1)}, "read_json": {"name": ("text", lambda: "a")}, "patience": {"seconds": ("number", lambda: 1.0)}}.items()},
    "Run.log": Call(_logged, {"step": ("count", lambda: 0), "values": ("metrics", lambda: {"a": 1.0}), "name": ("path", lambda: "a"), "value": ("json", lambda: {"a": 1}), "keep": ("count", lambda: 2)}),
}  # fmt: skip
