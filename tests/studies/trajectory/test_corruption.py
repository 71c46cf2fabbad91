"""Task 2 of *What training reveals*: the trainer against SGD written out, resume, labels, the study's code path."""

from __future__ import annotations

import torch

from excite.studies.trajectory.corruption import STUDY, VARIANTS, outcome
from excite.studies.trajectory.image_trajectory import TrainingLength, network, train
from studies.trajectory.images import RATE, images


def test_claims_and_figure_from_short_trainings() -> None:
    from excite.studies.judging.verdicts import judge
    from excite.studies.study import VariantResult

    x, y = images(12)
    parts = (x.float(), y.float(), x.float(), y.float())
    numbers, details = [], {}
    for number, variant in enumerate(VARIANTS):
        for seed in range(2):
            found = train(
                network(seed, (4, 6, 5)),
                parts,
                TrainingLength(2 + number, RATE),
                seed=seed,
                device=torch.device("cpu"),
            )
            found = {name: curve[:2] for name, curve in found.items()}
            result = outcome(found)
            numbers.append(VariantResult(variant, seed, dict(result.values), result.flags))
            details.setdefault(variant, []).append(result.detail)
    scale = STUDY.scales["quick"]
    assert all(judge(claim, numbers) is not None for claim in STUDY.claims(scale))
    figures = STUDY.method.figures(STUDY, scale, details, numbers)
    assert len(figures["figure"][1].axes) == 8
