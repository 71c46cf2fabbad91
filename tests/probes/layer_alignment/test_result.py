"""Results of alignment: access by name and the printed tables."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from excite.probes import alignment


def test_results_are_found_by_name_and_printed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)).double()
    result = alignment(model, torch.randn(5, 3, dtype=torch.float64))
    assert [layer.layer for layer in result] == ["0", "1"]
    (left, values, _), (_, _, right) = (torch.linalg.svd(layer.weight.detach()) for layer in model)
    assert result["0"].ratio == pytest.approx(float(values[0] ** 2 / values.square().sum()))
    assert result.between("0>1").value == pytest.approx(float((left[:, 0] @ right[0]).abs()))
    lines = str(result).splitlines()
    assert lines[0].split()[:2] == ["layer", "matrix"]
    assert lines[1].split()[:3] == ["0", "4×3", f"{result['0'].ratio:.4f}"]
    assert lines[-1].split()[0] == "0>1"
    with pytest.raises(KeyError, match="layers: 0, 1"):
        result["2"]
    with pytest.raises(KeyError, match="junctions: 0>1"):
        result.between("1>2")
