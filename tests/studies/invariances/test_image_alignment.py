"""Study `image-alignment`: steps and summaries against known ones, the claims on planted numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from excite import studies
from excite.studies.invariances import image_alignment
from excite.studies.invariances.image_alignment import (
    GROWN,
    MEASUREMENTS,
    STRIDE,
    TRAINED,
    batches,
    claims,
    grow,
    make,
    summarize,
)
from excite.studies.judging.verdicts import judge
from excite.studies.study import VariantResult
from studies.small import run_tiny

TINY = replace(image_alignment.SCALES["quick"], steps=10, seeds=1)


@pytest.mark.parametrize("network", image_alignment.NETWORKS)
def test_a_growing_step_has_its_length_and_lowers_the_risk(network: str) -> None:
    model = make(network, 0).double()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 3, 16, 16, generator=generator).double(), torch.tensor([1.0, -1.0] * 3).double()

    def risk() -> float:
        return torch.nn.functional.softplus(-y * model(x)[:, 0]).sum().item()

    before, start = [p.detach().clone() for p in model.parameters()], risk()
    grow(model, x, y)
    size = torch.stack([p.norm() for p in before]).norm()
    moved = torch.stack([(p - b).norm() for p, b in zip(model.parameters(), before)]).norm()
    assert float(moved / size) == pytest.approx(STRIDE, rel=1e-9)
    assert risk() < start


def test_batches_are_all_images_or_epochs_in_turn() -> None:
    assert [len(chosen) for chosen in batches(60, 3, "grow", 0)] == [60] * 3
    epoch = batches(60, 4, "sgd", 0)[:3]
    assert sorted(torch.cat(epoch).tolist()) == list(range(60))


def test_the_summary_takes_ends_and_the_least_layer() -> None:
    """fc2 ends lowest; the last fifth starts two measurements before the end."""
    curve = []
    for k in range(MEASUREMENTS + 1):
        ratio = {"conv1": 0.5, "fc1": 0.4 + 0.05 * k, "fc2": 0.3 + 0.01 * k, "out": 1.0}
        curve.append({"ratio": ratio, "rank": dict.fromkeys(ratio, 8.0 - 0.4 * k), "room": 0.1 * abs(k - 5),
                      "aligned": {"fc1>fc2": 0.1 * k, "fc2>out": 0.5}, "growth": 1 + k})  # fmt: skip
    found = summarize("AlexNet-like", curve)
    assert found["least"] == pytest.approx(0.4)
    assert found["settled"] == pytest.approx(0.02)
    assert (found["closer_fc1"], found["closer_fc2"]) == pytest.approx((0.5, 0.1))
    assert (found["aligned_fc1>fc2"], found["turned"]) == pytest.approx((1.0, 0.0))
    assert (found["rank_fc1"], found["rank"], found["room"], found["growth"]) == pytest.approx((0.5, 0.5, 0.0, 11.0))


def test_claims_on_planted_numbers() -> None:
    """Every claim holds, and every one fails on numbers of the other side."""

    def planted(sign: float) -> list[VariantResult]:
        numbers = []
        for seed in range(8):
            own = sign * (1 + 1e-3 * seed)
            for names in (GROWN, TRAINED):
                for network, variant in names.items():
                    hidden = [name.removesuffix(".weight") for name, _ in make(network, 0).named_parameters()]
                    values = {
                        "least": 1 - 0.1 * own,
                        "settled": 0.05 - 0.045 * own,
                        "turned": 0.1 * own,
                        "room": 0.1 * own,
                    }
                    values |= {f"closer_{name}": 0.1 * own for name in ("fc1", "fc2")}
                    values |= {f"aligned_{pair}": 0.9 + 0.05 * own for pair in ("fc1>fc2", "fc2>out", "fc1>out")}
                    values |= {f"rank_{name}": 1 - 0.5 * own for name in hidden}
                    numbers.append(VariantResult(variant, seed, values))
        return numbers

    listed = claims(TINY)
    assert [judge(claim, planted(1)).word for claim in listed] == ["holds"] * len(listed)
    assert [judge(claim, planted(-1)).word for claim in listed] == ["fails"] * len(listed)


@pytest.mark.slow
def test_the_whole_path_of_image_alignment(few_images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_alignment, "IMAGES", 20)
    result = run_tiny("image-alignment", TINY, few_images, monkeypatch)
    assert len(result.verdicts) == len(studies.STUDIES["image-alignment"].claims(TINY))
