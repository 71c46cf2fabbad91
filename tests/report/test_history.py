"""Series by name and by layer, read once."""

import numpy as np

from excite.report.history import MetricHistory


def test_series_are_read_once_and_layers_are_in_order():
    reads = []

    def series(name):
        reads.append(name)
        return np.arange(2), np.full(2, float(len(name)))

    history = MetricHistory(["rank/a", "rank/b", "rank", "loss"], series, order=("b", "a"))
    assert list(history.layers("rank")) == ["b", "a"]
    assert list(history.of("rank")) == ["", "b", "a"]
    assert sorted(reads) == ["rank", "rank/a", "rank/b"]
    assert len(history["nothing"][0]) == 0
    assert "nothing" not in reads
