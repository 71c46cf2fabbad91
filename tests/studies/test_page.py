"""Tables of results pages."""

from __future__ import annotations

import math

from excite.studies.page import table
from excite.studies.study import VariantResult

COLUMNS = {"gap": ("gap", "{:.2f}"), "loss": ("loss", "{:.1f}"), "absent": ("absent", "{}")}


def test_means_and_ranges_by_variant() -> None:
    numbers = [VariantResult("plain", seed, {"gap": gap, "loss": 1.0}) for seed, gap in enumerate((0.1, 0.3))]
    numbers.append(VariantResult("excited", 0, {"gap": math.inf}, flags=("doubtful",)))
    assert table(numbers, COLUMNS) == [
        ["", "gap", "loss", "trusted"],
        ["plain", "0.20 (0.10–0.30)", "1.0", "2 of 2"],
        ["excited", "not reached", "–", "0 of 1"],
    ]
