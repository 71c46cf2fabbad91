"""The attacks of the benchmark: name, norms and a function (model, x, y) -> adversarial images, all within [0, 1].

Those of adv_lib, torchattacks and Foolbox run with the defaults of their packages unless a number is given here; iterative
ones get 1,000 steps, as in AttackBench, and nothing is rounded to 256 levels.
"""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from excite.margin import SearchOptions, margins

Attack = Callable[[nn.Module, Tensor, Tensor], Tensor]
NORMS = ("inf", "2", "1")
STEPS = 1000
# Radius at which the bisection of APGD begins.
RADII = {"inf": 0.1, "2": 4.0, "1": 100.0}


@dataclass(frozen=True)
class Contender:
    """An attack with the norms that it has, and the images of a cell that it is run on at most."""

    name: str
    norms: tuple[str, ...]
    run: Callable[[nn.Module, Tensor, Tensor, str], Tensor]
    images: int = 250


def contenders() -> list[Contender]:
    """All attacks, ours first."""
    return [
        Contender("excite", NORMS, _excite, 1000),
        Contender("apgd_t", NORMS, _apgd_t, 1000),
        Contender("fmn", NORMS, _fmn),
        Contender("ddn", ("2",), _ddn),
        Contender("sdf", ("2",), _sdf),
        Contender("fab", ("inf", "2"), _fab),  # that of torchattacks 3.5.1 fails in the norm 1
        Contender("pdpgd", NORMS, _pdpgd),
        Contender("alma", ("2", "1"), _alma),
        Contender("foolbox_fmn", NORMS, _foolbox_fmn),
    ]


WORDS = {
    "excite": "excite.margins",
    "apgd_t": "APGD_t, bisected (adv_lib)",
    "fmn": "FMN (adv_lib)",
    "sdf": "SuperDeepFool (adv_lib)",
    "ddn": "DDN (adv_lib)",
    "alma": "ALMA (adv_lib)",
    "pdpgd": "PDPGD (adv_lib)",
    "fab": "FAB (torchattacks)",
    "foolbox_fmn": "FMN (Foolbox)",
}


def _excite(model: nn.Module, x: Tensor, y: Tensor, norm: str) -> Tensor:
    options = SearchOptions(certify=False)
    found = margins(model, x, y, norm=norm, bounds=(0, 1), perturbations=True, options=options)
    assert isinstance(found.perturbations, Tensor)
    return x + found.perturbations


@contextmanager
def stand_ins() -> Iterator[None]:
    """Empty modules for what adv_lib and Foolbox import, and need not for the attacks used here, while they are imported."""
    added = []
    for name in ("torchvision", "torchvision.models", "visdom", "git"):
        try:
            importlib.import_module(name)
        except ImportError:
            added.append(name)
            sys.modules[name] = types.ModuleType(name)
    if "torchvision" in added:
        sys.modules["torchvision"].models = sys.modules["torchvision.models"]  # type: ignore[attr-defined]
    if "git" in added:
        sys.modules["git"].Repo = None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


def adv_lib() -> Any:
    with stand_ins(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("adv_lib.attacks")


def _order(norm: str) -> float:
    return float(norm)


def _apgd_t(model: nn.Module, x: Tensor, y: Tensor, norm: str) -> Tensor:
    adv_lib()
    minimal = importlib.import_module("adv_lib.attacks.auto_pgd").minimal_apgd
    settings = {"loss_function": "dlr", "n_iter": 20, "binary_search_steps": 13, "use_large_reps": False}
    return minimal(
        model, x, y, norm=_order(norm), max_eps=RADII[norm], targeted_version=True, num_targets=9, **settings
    )


def _fmn(model: nn.Module, x: Tensor, y: Tensor, norm: str) -> Tensor:
    return adv_lib().fmn(model, x, y, norm=_order(norm), steps=STEPS)


def _sdf(model: nn.Module, x: Tensor, y: Tensor, norm: str) -> Tensor:
    return adv_lib().sdf(model, x, y)


def _ddn(model: nn.Module, x: Tensor, y: Tensor, norm: str) -> Tensor:
    return adv_lib().ddn(model, x, y, steps=STEPS, levels=None)


def _alma(model: nn.Module, x: Tensor, y: Tensor, norm: str) -> Tensor:
    start = {"2": 1.0, "1": 0.5}[norm]
    return adv_lib().alma(model, x, y, num_steps=STEPS, distance=f"l{norm}", init_lr_distance=start)


def _pdpgd(model: nn.Module, x: Tensor, y: Tensor, norm: str) -> Tensor:
    return adv_lib().pdpgd(model, x, y, norm=_order(norm), num_steps=STEPS)


def _fab(model: nn.Module, x: Tensor, y: Tensor, norm: str) -> Tensor:
    torchattacks = importlib.import_module("torchattacks")
    eps = {"inf": 0.3, "2": 4.0, "1": 100.0}[norm]
    attack = torchattacks.FAB(model, norm="Linf" if norm == "inf" else f"L{norm}", eps=eps, steps=100, n_classes=10)
    return attack(x, y)


def _foolbox_fmn(model: nn.Module, x: Tensor, y: Tensor, norm: str) -> Tensor:
    with stand_ins(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import foolbox
    name = {"inf": "LInfFMNAttack", "2": "L2FMNAttack", "1": "L1FMNAttack"}[norm]
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device=x.device)
    attack = getattr(foolbox.attacks, name)(steps=STEPS)
    return attack(wrapped, x, y, epsilons=None)[1]
