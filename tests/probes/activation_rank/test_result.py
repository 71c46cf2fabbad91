"""Results of richness and their table."""

import pytest

from excite.probes import Richness, richness
from models import build


def test_the_table():
    model, x = build("mlp", batch=30)
    found = richness(model, x, units=["2"])
    assert isinstance(found, Richness)
    row = found.rows(k=2)[1]
    assert row["layer"] == "2"
    assert row["width"] == 8
    assert row["units"] == 6
    assert float(row["effective_share"]) == pytest.approx(float(row["effective_rank"]) / 8)
    assert float(row["explained_by_2"]) == pytest.approx(float(found["2"].covariance.explained(2)))
    assert found["0"].units is None
    assert str(found).splitlines()[0].split()[:3] == ["layer", "width", "rows"]
    with pytest.raises(KeyError, match="layers: 0, 2, 4"):
        found["1"]
