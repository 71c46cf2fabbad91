"""What the weights of transformers conserve: the laws of one block, and the reasons why a weight has none.

    python -m benchmarks.transformer_laws          # the tables of docs/transformer-laws.md
    python -m benchmarks.transformer_laws --check  # also: rates under gradient flow, and rests of the ledger over 100 steps

Models are built from tiny configurations of Hugging Face Transformers; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import excite
from excite.probes import conservation
from excite.wiring import Group, Site

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from models import FAMILIES, transformer

TITLES = {"gpt2": "GPT-2", "llama": "Llama", "qwen3": "Qwen3", "bert": "BERT", "vit": "ViT"}


def rows(groups: tuple[Group, ...], block: str = "layer 0, ") -> list[tuple[str, str, str, str]]:
    """The laws and reasons that involve weights of the first block, heads together: producers, consumers, law, why."""
    found: dict[tuple[str, str, str, str], None] = {}
    for group in groups:
        sides = [_parts(sites, block) for sites in (group.producers, group.consumers)]
        if any(site.role.startswith(block) for site in (*group.producers, *group.consumers)):
            found.setdefault((sides[0], sides[1], group.law, group.why))
    return list(found)


def _parts(sites: tuple[Site, ...], block: str) -> str:
    own = [site.role.removeprefix(block) for site in sites if site.role.startswith(block)]
    parts = [re.sub(r"^(key )?heads? [\d–, ]+, ", "", role) for role in own]
    others = [site.role for site in sites if site.role and not site.role.startswith(block)]
    return ", ".join(dict.fromkeys([*parts, *others]))


def rates(model: nn.Module, x: Mapping[str, Tensor], groups: tuple[Group, ...]) -> float:
    """Largest rate of change of a law under gradient flow of cross-entropy, over the sum of its terms' absolute values."""
    weights = dict(model.named_parameters())
    found = torch.autograd.grad(loss(model, x), list(weights.values()), allow_unused=True)
    grads = {path: torch.zeros_like(w) if g is None else g for (path, w), g in zip(weights.items(), found)}
    worst = 0.0
    for group in groups:
        if group.law == "none":
            continue
        rate, size = torch.zeros(group.channels, dtype=torch.float64), 0.0
        for sites, sign in ((group.producers, 1), (group.consumers, -1)):
            for site in sites:
                terms = site.times * site.rows(weights[site.parameter].detach()) * site.rows(grads[site.parameter])
                rate += sign * terms.sum(1)
                size += float(terms.abs().sum())
        worst = max(worst, float(rate.abs().max()) / max(size, 1e-300))
    return worst


def loss(model: nn.Module, x: Mapping[str, Tensor]) -> Tensor:
    """Cross-entropy of the logits with made-up labels."""
    returned = model(**x)
    logits = getattr(returned, "logits", returned).flatten(0, -2)
    return F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1])


def ledger_rest(family: str, steps: int = 100) -> tuple[float, bool]:
    """Largest rest of the ledger over its scale after steps of SGD, and whether every law was checked.

    Also of the laws as integrated from the start and the squared updates, and of the sums over classes.
    """
    model, x = transformer(family, layers=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-2)
    with conservation(model, optimizer, x, output="logits") as ledger:
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model, x).backward()
            optimizer.step()
        report = ledger.read()
    rests = [rest for entry in report.entries for rest in (entry.relative, entry.integral_error)]
    return max([*rests, *(entry.relative for entry in report.translations)]), report.holds


def without_eps(model: nn.Module) -> nn.Module:
    """The model with a negligible eps in every normalization: the law in front of one is exact for eps = 0."""
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if hasattr(module, name):
                setattr(module, name, 1e-30)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for family in FAMILIES:
        model, x = transformer(family)
        print(f"\n### {TITLES[family]}\n\n| squares of | minus squares of | law | why |\n| --- | --- | --- | --- |")
        for row in rows(excite.trace(model, x, output="logits").groups):
            print(f"| {' | '.join(cell or '·' for cell in row)} |")
        if check:
            for kernel in ("sdpa", "eager"):
                model, x = transformer(family, kernel, layers=2)
                groups = excite.trace(without_eps(model), x, output="logits").groups
                print(f"{kernel}: largest rate {rates(model, x, groups):.0e}")
            rest, holds = ledger_rest(family)
            print(
                f"ledger, 100 steps of SGD with momentum and decay: largest rest {rest:.0e}, every law checked: {holds}"
            )


if __name__ == "__main__":
    main()
