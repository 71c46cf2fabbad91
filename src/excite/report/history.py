"""Metrics of a run, by name and by layer; series are read when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from excite.report.panels import in_order
from excite.report.subsample import Series


class MetricHistory:
    """Metrics: names, and series read when they are needed."""

    def __init__(self, names: Iterable[str], series: Callable[[str], Series], order: Sequence[str] = ()):
        self._names, self._series, self.order = list(names), series, order
        self._known = set(self._names)
        self._read: dict[str, Series] = {}

    def __getitem__(self, name: str) -> Series:
        if name not in self._read:
            self._read[name] = self._series(name) if name in self._known else (np.empty(0, np.int64), np.empty(0))
        return self._read[name]

    def layers(self, key: str) -> dict[str, Series]:
        """Series `key/layer` by layer, in the order of execution."""
        result = [name[len(key) + 1 :] for name in self._names if name.startswith(f"{key}/")]
        return {layer: self[f"{key}/{layer}"] for layer in in_order(result, self.order)}

    def of(self, key: str) -> dict[str, Series]:
        """The same, with `key` itself as the layer ""."""
        whole = {"": self[key]} if key in self._known else {}
        return whole | self.layers(key)
