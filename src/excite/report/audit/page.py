"""The page of an audit: one self-contained HTML file."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from excite._version import __version__
from excite.probes import LayerRichness
from excite.report.audit import figures
from excite.report.audit.narrative import IS, SPLIT_NAMES, number, unit_counts
from excite.report.audit.result import Audit
from excite.report.audit.target import TheoremResult
from excite.report.figures import Chart
from excite.report.page import SCRIPTS, STYLES, asset

_LISTED = 40  # deficient units named in the table; the rest are in the run's artifact


def render(audit: Audit) -> str:
    """Renders the page to HTML."""
    environment = Environment(
        loader=PackageLoader("excite.report.audit"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    layers = list(audit.layers)
    return environment.get_template("audit.html.j2").render(
        audit=audit,
        version=__version__,
        styles=[asset(name) for name in STYLES],
        scripts=[asset(name) for name in SCRIPTS[:-1]],
        part=SPLIT_NAMES,
        number=number,
        is_=IS,
        layers=[_layer(layer, last=layer is layers[-1]) for layer in layers],
        example=_example(layers),
        bounds=[_bound(theorem) for theorem in audit.theorems],
        charts=_charts(audit),
    )


def _layer(layer_richness: LayerRichness, *, last: bool) -> dict[str, Any]:
    c = layer_richness.covariance
    row: dict[str, Any] = {
        "name": layer_richness.layer,
        "kind": layer_richness.kind,
        "width": layer_richness.width,
        "points": layer_richness.points,
        "effective": f"{c.effective_rank:.1f}",
        "share": float(c.effective_rank) / layer_richness.width,
        "participation": f"{c.participation_ratio:.1f}",
        "rank": f"{c.rank:.0f}",
        "ends": f"{c.smallest.over(float(c.largest) or 1.0):.1e}",
        "notes": [],
        "units": None,
        "why": layer_richness.units_why,
        "last": last,
    }
    if not layer_richness.exact:
        row["notes"].append(
            f"from a sketch: every eigenvalue may be larger by up to {layer_richness.covariance.slack:.3g}"
        )
    if layer_richness.sampling is not None:
        row["notes"].append(str(layer_richness.sampling))
    if layer_richness.points <= layer_richness.width:
        row["notes"].append(
            f"only {layer_richness.points} rows for {layer_richness.width} directions: the rank cannot be full"
        )
    if layer_richness.units is not None:
        deficient = layer_richness.units.deficient
        row["units"] = {
            "counts": unit_counts(layer_richness.units),
            "all": len(layer_richness.units),
            "sees": layer_richness.units.width,
            "deficient": ", ".join(map(str, deficient[:_LISTED])) + (" …" if len(deficient) > _LISTED else ""),
            "smallest": _weakest(layer_richness),
        }
    return row


def _weakest(layer_richness: LayerRichness) -> str:
    """Smallest over largest eigenvalue of the weakest unit that is excited."""
    units = layer_richness.units
    if units is None or not units.excited.any():
        return "–"
    return f"{float((units.smallest[units.excited] / units.largest[units.excited]).min()):.1e}"


def _example(layers: list[LayerRichness]) -> dict[str, str]:
    """The layer used to explain the effective rank: the one with the smallest fraction."""
    lowest = min(layers, key=lambda layer: float(layer.covariance.effective_rank) / layer.width)
    return {"name": lowest.layer, "rank": f"{lowest.covariance.effective_rank:.1f}", "width": str(lowest.width)}


def _bound(theorem_result: TheoremResult) -> dict[str, Any]:
    bound = theorem_result.bound
    state = "no number" if bound.value is None else "holds" if bound.holds else "open"
    return {
        "name": bound.name,
        "quantity": bound.quantity,
        "sign": "≤" if bound.side == "upper" else "≥",
        "value": bound.value,
        "truth": theorem_result.measured,
        "away": "larger" if bound.side == "upper" else "smaller",
        "how": theorem_result.how,
        "ratio": theorem_result.ratio,
        "state": state,
        "assumptions": bound.assumptions,
        "layers": theorem_result.layers if bound.value is not None else (),
    }


def _upper_bounds(audit: Audit) -> dict[str, float]:
    """Upper bounds of theorems on the Lipschitz constant of the network itself."""
    return {
        theorem.bound.name: theorem.bound.value
        for theorem in audit.theorems
        if theorem.bound.quantity == "Lipschitz constant of the network" and theorem.bound.value is not None
    }


def _charts(audit: Audit) -> dict[str, list[Chart]]:
    """Charts by the name of their place on the page."""
    charts = {"explained": [figures.explained_variance(audit.layers)]}
    if audit.lipschitz[0].local:
        charts["constants"] = [figures.lipschitz_constants(audit.lipschitz[0], _upper_bounds(audit))]
    return charts | {f"margins-{norm}": [figures.margin_curves(m, norm)] for norm, m in audit.margins.items()}
