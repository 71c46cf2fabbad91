"""The page of an audit: one self-contained HTML file."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from excite._version import __version__
from excite.probes import LayerRichness
from excite.report.audit import figures
from excite.report.audit.narrative import IS, PART, number, unit_counts
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
        part=PART,
        number=number,
        is_=IS,
        layers=[_layer(one, last=one is layers[-1]) for one in layers],
        example=_example(layers),
        bounds=[_bound(one) for one in audit.theorems],
        charts=_charts(audit),
    )


def _layer(one: LayerRichness, *, last: bool) -> dict[str, Any]:
    c = one.covariance
    found: dict[str, Any] = {
        "name": one.layer,
        "kind": one.kind,
        "width": one.width,
        "points": one.points,
        "effective": f"{c.effective_rank:.1f}",
        "share": float(c.effective_rank) / one.width,
        "participation": f"{c.participation_ratio:.1f}",
        "rank": f"{c.rank:.0f}",
        "ends": f"{c.smallest.over(float(c.largest) or 1.0):.1e}",
        "notes": [],
        "units": None,
        "why": one.units_why,
        "last": last,
    }
    if not one.exact:
        found["notes"].append(f"from a sketch: every eigenvalue may be larger by up to {one.covariance.slack:.3g}")
    if one.sampling is not None:
        found["notes"].append(str(one.sampling))
    if one.points <= one.width:
        found["notes"].append(f"only {one.points} rows for {one.width} directions: the rank cannot be full")
    if one.units is not None:
        deficient = one.units.deficient
        found["units"] = {
            "counts": unit_counts(one.units),
            "all": len(one.units),
            "sees": one.units.width,
            "deficient": ", ".join(map(str, deficient[:_LISTED])) + (" …" if len(deficient) > _LISTED else ""),
            "smallest": _weakest(one),
        }
    return found


def _weakest(one: LayerRichness) -> str:
    """Smallest over largest eigenvalue of the weakest unit that is excited."""
    units = one.units
    if units is None or not units.excited.any():
        return "–"
    return f"{float((units.smallest[units.excited] / units.largest[units.excited]).min()):.1e}"


def _example(layers: list[LayerRichness]) -> dict[str, str]:
    """The layer used to explain the effective rank: the one with the smallest fraction."""
    one = min(layers, key=lambda layer: float(layer.covariance.effective_rank) / layer.width)
    return {"name": one.layer, "rank": f"{one.covariance.effective_rank:.1f}", "width": str(one.width)}


def _bound(one: TheoremResult) -> dict[str, Any]:
    bound = one.bound
    state = "no number" if bound.value is None else "holds" if bound.holds else "open"
    return {
        "name": bound.name,
        "quantity": bound.quantity,
        "sign": "≤" if bound.side == "upper" else "≥",
        "value": bound.value,
        "truth": one.measured,
        "away": "larger" if bound.side == "upper" else "smaller",
        "how": one.how,
        "ratio": one.ratio,
        "state": state,
        "assumptions": bound.assumptions,
        "layers": one.layers if bound.value is not None else (),
    }


def _upper_bounds(audit: Audit) -> dict[str, float]:
    """Upper bounds of theorems on the Lipschitz constant of the network itself."""
    return {
        one.bound.name: one.bound.value
        for one in audit.theorems
        if one.bound.quantity == "Lipschitz constant of the network" and one.bound.value is not None
    }


def _charts(audit: Audit) -> dict[str, list[Chart]]:
    """Charts by the name of their place on the page."""
    found = {"explained": [figures.explained_variance(audit.layers)]}
    if audit.lipschitz[0].local:
        found["constants"] = [figures.lipschitz_constants(audit.lipschitz[0], _upper_bounds(audit))]
    return found | {f"margins-{norm}": [figures.margin_curves(m, norm)] for norm, m in audit.margins.items()}
