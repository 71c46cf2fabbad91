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


def test_layers_are_called_by_name_and_role():
    names = ["rank/a", "rank/share/a", "rank/share/b", "recorder/lead/update/a"]
    history = MetricHistory(names, lambda name: (np.arange(1), np.zeros(1)), roles={"a": "layer 0, query"})
    assert list(history.layers("rank/share")) == ["a (layer 0, query)", "b"]
    assert list(history.layers("recorder/lead")) == ["update/a (layer 0, query)"]
    assert len(history["rank/share/a (layer 0, query)"][0]) == 1
    assert len(history["rank/other/a (layer 0, query)"][0]) == 0
