"""The loss as a probe."""

from __future__ import annotations

import math

import numpy as np
import pytest
from torch import nn

from excite.probes import Every, Loss
from excite.probes.base import StepContext


class Losses:
    """The history of a run that measured the loss alone."""

    def __init__(self, *values: float) -> None:
        self.series = np.arange(len(values)), np.array(values)

    def __getitem__(self, name: str) -> object:
        assert name == "loss/step"
        return self.series


def test_the_probe_records_the_loss_of_every_step() -> None:
    model, probe = nn.Linear(1, 1), Loss.default()
    assert probe.schedule == Every(1)
    assert probe.measure(StepContext(model, 3, loss=0.25)) == {"step": 0.25}
    assert probe.measure(StepContext(model, 0)) == {}


@pytest.mark.parametrize(
    ("values", "kinds", "text"),
    [
        ((4.0, 2.0, 1.0), ["note"], "The loss went from 4 to 1."),
        ((4.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0), ["note"], "The loss went from 4 to 2; it has been lower, 1 at step 3."),
        ((2.0, 1.0, 1.0, 1.0, 8.0, 8.0, 8.0), ["warning"], "training diverges"),
        ((1.0, 1.1, 0.9, 1.05, 0.95, 1.0), ["note"], "did not change beyond its noise: 1 at first, 1 now."),
        (
            (2.3, 9e5, *(160.0 - i / 40 for i in range(398))),
            ["note"],
            "from 160 to 150. It jumped there from 2.3 at the first step.",
        ),
        ((2.3, *[150.0] * 399), ["note"], "150 at first, 150 now. It jumped there from 2.3 at the first step."),
        ((2.0, math.nan, 1.0), ["warning", "note"], "not a finite number at step 1"),
        ((2.0,), [], ""),
    ],
)
def test_findings_about_the_loss(values: tuple[float, ...], kinds: list[str], text: str) -> None:
    findings = Loss.findings(Losses(*values))  # type: ignore[arg-type]
    assert [finding.kind for finding in findings] == kinds
    assert not findings or text in findings[0].text
