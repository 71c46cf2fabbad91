"""The picture of `decomposition`: errors of ν = μ ∘ h, and numbers of paths by depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from excite.studies.figures import COLOURS, DASHES
from excite.studies.numbers import Numbers
from excite.studies.study import Study
from excite.wiring.paths import LIMIT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[Numbers]
) -> dict[str, tuple[str, Figure]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    errors = {arm: seeds[0]["errors"] for arm, seeds in details.items() if "errors" in seeds[0]}
    bins = np.geomspace(1e-18, 1e-14, 33)
    for k, (arm, found) in enumerate(errors.items()):
        left.hist(np.maximum(found, 1.01e-18), bins, histtype="step", linewidth=1.8, color=COLOURS[2 + k], label=arm)
    left.axvline(1e-12, color=COLOURS[0], linestyle="--", linewidth=1.2)
    left.set(xscale="log", xlim=(1e-18, 1e-11), xlabel="|ν(x) − μ(h(x))| / Σ|h|", ylabel="points")
    left.set_title(
        "the decomposition holds to rounding (dashed: claimed 1e-12;\nfirst bin: errors of exactly 0)", fontsize=10
    )
    left.legend()
    for seeds in details.values():
        if "logs" in seeds[0]:
            found = seeds[0]
            for k, (name, logs) in enumerate(found["logs"].items()):
                right.plot(found["depths"], logs, marker="o", color=COLOURS[2 + k], linestyle=DASHES[k], label=name)
            right.set_title(
                f"number of paths, width {found['width']} (images of {found.get('side', 32)}×{found.get('side', 32)})",
                fontsize=10,
            )
            right.axhline(np.log10(LIMIT), color=COLOURS[0], linestyle=":", linewidth=1.2, label="limit of enumeration")
            right.legend()
    right.set(xlabel="layers", ylabel="log10 of the number of paths")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.suptitle(study.title, fontsize=13)
    return {"figure": (f"{study.title}: errors, and numbers of paths", figure)}
