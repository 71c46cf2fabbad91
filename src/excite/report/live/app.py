"""The live page as an application: a list of runs, a page for one or several, and the numbers as JSON."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from excite.errors import ExciteError, InputError
from excite.report.collect import collect
from excite.report.live.folder import MAX_RUNS, NotFound, RunRow, Runs, start_reader
from excite.report.live.guard import Guard
from excite.report.live.sharing import Sharing
from excite.report.live.tasks import sweeps
from excite.report.margin_history import margin_history
from excite.report.page import ASSETS, SCRIPTS, asset, compile_templates, details, render
from excite.report.verdict.contents import first_line, to_json
from excite.report.verdict.outcome import TEST_MEDIAN, displayed_status
from excite.report.view import MAX_METRICS, POINTS, describe, draw, findings, run_findings, select
from excite.runs.reader import overview, read_status

MAX_COMPARED, MAX_KEYS, FIRST_PANELS = 12, 64, 3
_TEMPLATES = ("live.html.j2", "verdict.html.j2", "history.html.j2", "panels.html.j2", "base.html.j2", "list.html.j2")
_TYPES = {".js": "text/javascript", ".css": "text/css"}
_log = logging.getLogger("excite.serve")
Answer = Callable[[Runs, Request], Response]


def make_app(root: str | os.PathLike[str], token: str | None = None, host: str = "127.0.0.1") -> Guard:
    """The ASGI application for the runs below `root`. `token`: what every request must bring, if not None."""
    runs = Runs(root)
    sharing: Sharing[Response] = Sharing()
    failures: set[tuple[object, ...]] = set()

    def route(path: str, answer: Answer) -> Route:
        def compute(request: Request) -> Response:
            try:
                return answer(runs, request)
            except (ExciteError, HTTPException) as error:
                return _refused(runs, error)
            except Exception as error:
                trace = error.__traceback__
                failure = (path, type(error), trace and trace.tb_lasti)
                if failure not in failures:  # once
                    failures.add(failure)
                    _log.exception("%s could not be answered", path)
                return PlainTextResponse(
                    "this request could not be answered; the window in which excite serve runs says why\n", 500
                )

        async def endpoint(request: Request) -> Response:
            key = (request.url.path, request.url.query)  # all that answers depend on
            client = request.client.host if request.client else ""
            return await sharing.get(key, client, lambda: compute(request))

        return Route(path, endpoint, methods=["GET"])

    app = Starlette(
        routes=[
            route("/", _list_page),
            route("/view", _view_page),
            route("/api/runs", _list_data),
            route("/api/tasks", _tasks_data),
            route("/api/view", _view_data),
            route("/api/findings", _findings_data),
            route("/api/verdict", _verdict_data),
            route("/api/details", _details_data),
            route("/assets/{name}", _asset),
        ],
        exception_handlers={HTTPException: lambda request, error: _refused(runs, error)},
    )
    app.state.runs = runs
    return Guard(app, token, host)


def prepare() -> None:
    """Does what the first page would wait for: starts a process that reads, loads templates and assets."""
    start_reader()
    compile_templates(*_TEMPLATES)
    for name in ASSETS:
        _asset_bytes(name)


def _list_page(runs: Runs, request: Request) -> Response:
    return HTMLResponse(render("list.html.j2", title=f"{runs.name}: runs", folder=runs.name))


def _view_page(runs: Runs, request: Request) -> Response:
    chosen = _chosen(runs, request)
    labels = [runs.label(name) for name in chosen]
    try:
        with runs.reading(*chosen):
            first: dict[str, Any] | None = _current(runs, chosen, ["*"], rough=True)
    except ExciteError:
        first = None  # the page asks again, and says what is wrong
    result: dict[str, Any] = {"verdict": None, "ranking": []}
    with suppress(ExciteError), runs.reading(*chosen):
        result = _verdict(runs, chosen, narrative=False)
        first = first and first | result
    texts = {"title": " · ".join(labels), "folder": runs.name, "runs": chosen, "scripts": SCRIPTS}
    return HTMLResponse(
        render("live.html.j2", first=first, verdict=result["verdict"], ranking=result["ranking"], **texts)
    )


def _list_data(runs: Runs, request: Request) -> Response:
    rows = runs.rows()
    listed = [
        {
            "id": row.id, "label": runs.label(row.id), "status": row.status, "reason": row.reason, "step": row.step,
            "loss": _number(row.loss), "updated": row.updated, **_summary(row),
        }
        for row in rows
    ]  # fmt: skip
    return _json({"runs": listed, "cut": len(rows) == MAX_RUNS})


def _summary(row: RunRow) -> dict[str, Any]:
    """Robustness of one run of the list."""
    outcome = row.outcome
    spark = row.spark and {"name": row.spark[0], "values": [_number(value) for value in row.spark[1]]}
    return {
        "margin": _number(outcome.margin), "margin_text": outcome.margin_text, "gap": None if outcome.gap is None else _number(outcome.gap.value),
        "chance": _number(outcome.chance), "accuracy": _number(outcome.accuracy.get("test")), "alerts": row.alerts, "spark": spark,
    }  # fmt: skip


def _tasks_data(runs: Runs, request: Request) -> Response:
    return _json({"sweeps": sweeps(runs.real)})


def _view_data(runs: Runs, request: Request) -> Response:
    chosen = _chosen(runs, request)
    keys = request.query_params.getlist("key")
    if len(keys) > MAX_KEYS:
        raise InputError(f"at most {MAX_KEYS} quantities at once; got {len(keys)}")
    points = int(_parameter(request, "points", 40, 4000) or POINTS)
    steps = _parameter(request, "low"), _parameter(request, "high")
    since, contains = request.query_params.get("since"), request.query_params.get("names", "")
    with runs.reading(*chosen):
        return _json(_current(runs, chosen, keys, points, steps, since=since, contains=contains))


def _current(
    runs: Runs,
    chosen: list[str],
    keys: list[str],
    points: int = POINTS,
    steps: tuple[float | None, float | None] = (None, None),
    rough: bool = False,
    since: str | None = None,
    contains: str = "",
) -> dict[str, Any]:
    """Status of the runs, and the curves between two steps if anything was written after the version `since`."""
    shown = runs.shown(chosen)
    heads = []
    for name, run in zip(chosen, shown):
        status, reason = displayed_status(
            *read_status(runs.path(name), runs.real), overview(run.metrics_reader, (TEST_MEDIAN,), ())
        )
        last = run.metrics_reader.last()
        heads.append(
            {
                "id": name, "label": run.label, "group": run.group, "status": status, "reason": reason,
                "step": None if last is None else last[0], "updated": None if last is None else last[1],
            }
        )  # fmt: skip
    version = "-".join(str(run.metrics_reader.version) for run in shown)
    answer: dict[str, Any] = {"version": version, "runs": heads}
    if since != version:
        names, left_out = select(shown, MAX_METRICS, contains)
        panels = describe(shown, names)
        if "*" in keys:  # a page that does not know yet what there is; at once only the first panel
            keys = [*keys, *(panel["quantities"][0]["key"] for panel in panels[: 1 if rough else FIRST_PANELS])]
        data = draw(shown, keys, points, *steps, rough, names=names)
        answer |= {"panels": panels, "data": data, "left_out": left_out, "margins": margin_history(shown)}
    return answer


def _findings_data(runs: Runs, request: Request) -> Response:
    chosen = _chosen(runs, request)
    with runs.reading(*chosen):
        return _json({"findings": findings(runs.shown(chosen), MAX_METRICS)})


def _verdict_data(runs: Runs, request: Request) -> Response:
    chosen = _chosen(runs, request)
    with runs.reading(*chosen):
        return _json(_verdict(runs, chosen))


def _verdict(runs: Runs, chosen: list[str], narrative: bool = True) -> dict[str, Any]:
    """The first line, the ranking of several runs, the settings that differ; with `narrative` also what the findings say."""
    shown = runs.shown(chosen)
    variants = [
        replace(variant, name=runs.label(name)) for name in chosen for variant in collect([runs.path(name)], runs.real)
    ]
    worst = next(iter(run_findings(shown[0], MAX_METRICS)), None) if len(shown) == 1 and narrative else None
    line, outcomes = first_line(variants, runs.overviews(chosen), worst)
    result = to_json(line, outcomes, variants)
    if narrative:
        result["html"] = render("verdict.html.j2", **result)
    return result


def _details_data(runs: Runs, request: Request) -> Response:
    chosen = _chosen(runs, request)
    with runs.reading(*chosen):
        for name in chosen:
            runs.metrics_reader(name)  # says what is wrong with the metrics
        return _json(details([runs.path(name) for name in chosen], runs.real))


def _asset(runs: Runs, request: Request) -> Response:
    name = request.path_params["name"]
    if name not in ASSETS:
        raise HTTPException(404)
    return Response(
        _asset_bytes(name), media_type=_TYPES[Path(name).suffix], headers={"cache-control": "private, max-age=3600"}
    )


@cache
def _asset_bytes(name: str) -> bytes:
    return asset(name).encode()


def _chosen(runs: Runs, request: Request) -> list[str]:
    """The runs that a request names; every one has to be there."""
    names = list(dict.fromkeys(request.query_params.getlist("run")))
    if not names:
        raise InputError("expected ?run=NAME, once for every run")
    if len(names) > MAX_COMPARED:
        raise InputError(f"at most {MAX_COMPARED} runs can be compared; got {len(names)}")
    for name in names:
        runs.path(name)
    return names


def _parameter(request: Request, name: str, minimum: float = -math.inf, maximum: float = math.inf) -> float | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not minimum <= value <= maximum or not math.isfinite(value):
        raise InputError(
            f"{name}: expected a number{f' from {minimum:g} to {maximum:g}' if minimum > -math.inf else ''}"
        )
    return value


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _json(value: Any) -> Response:
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Response(text, media_type="application/json")


def _refused(runs: Runs, error: Exception) -> Response:
    """The answer to a request that failed: one line, no traceback, no path outside the folder."""
    if isinstance(error, HTTPException):
        return PlainTextResponse(f"{error.detail}\n", error.status_code, headers=error.headers)
    assert isinstance(error, ExciteError)
    status = 404 if isinstance(error, NotFound) else 400 if isinstance(error, InputError) else 422
    return PlainTextResponse(f"{runs.within(error)}\n", status)
