"""Metrics of a run, by name and by layer; series are read when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from excite.probes.findings import with_role
from excite.report.panels import in_order
from excite.report.subsample import Series


class MetricHistory:
    """Metrics: names, and series read when they are needed.

    Layers, heads and laws that have a role are called by their name and role: "h.3.attn/head5 (layer 3, head 5)".

    Args:
        names: Names of all metrics.
        series: Steps and values of a metric.
        order: Layers in the order of execution.
        roles: What layers, heads and laws do, by name.
    """

    def __init__(
        self,
        names: Iterable[str],
        series: Callable[[str], Series],
        order: Sequence[str] = (),
        roles: Mapping[str, str] | None = None,
    ):
        self._names, self._series, self.order, self._roles = list(names), series, order, roles or {}
        self._called: dict[str, str] = {}  # names by what they are called
        self._known = set(self._names)
        self._read: dict[str, Series] = {}

    def __getitem__(self, name: str) -> Series:
        if name not in self._known and self._roles and (of := name.split("/", 2))[-1] in self._called:
            name = "/".join([*of[:2], self._called[of[-1]]])
        if name not in self._read:
            self._read[name] = self._series(name) if name in self._known else (np.empty(0, np.int64), np.empty(0))
        return self._read[name]

    def layers(self, key: str) -> dict[str, Series]:
        """Series `key/layer` by layer, in the order of execution."""
        result = [name[len(key) + 1 :] for name in self._names if name.startswith(f"{key}/")]
        return {self._call(layer): self[f"{key}/{layer}"] for layer in in_order(result, self.order)}

    def _call(self, layer: str) -> str:
        (first, _, inner), (head, _, last) = layer.partition("/"), layer.rpartition("/")
        described = with_role(layer, self._roles)
        if described == layer and inner in self._roles:  # such as update/LAYER
            described = f"{first}/{with_role(inner, self._roles)}"
        elif described == layer and head in self._roles:  # such as LAYER/UNIT
            described = f"{with_role(head, self._roles)}/{last}"
        self._called[described] = layer
        return described

    def of(self, key: str) -> dict[str, Series]:
        """The same, with `key` itself as the layer ""."""
        whole = {"": self[key]} if key in self._known else {}
        return whole | self.layers(key)
