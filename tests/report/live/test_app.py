"""What the live page answers, and what it refuses: 4xx, never a file, never a traceback."""

import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
import socket
import time
from contextlib import suppress
from urllib.parse import quote

import numpy as np
import pytest

from excite import InputError, load_run
from excite.errors import ExciteError
from excite.report.live import serve as serve_runs
from excite.report.live.guard import is_loopback
from excite.runs import Run

from .conftest import EVIL, SECRET, make_run, serving

TOKEN = "correct-horse-battery"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Runs that tests do not change."""
    tmp_path = tmp_path_factory.mktemp("live")
    make_run(tmp_path / "runs/a")
    make_run(tmp_path / "runs/deep/er/b c", status="failed")
    make_run(tmp_path / "outside")
    make_run(tmp_path / "runs/.hidden")
    (tmp_path / "secret.txt").write_text(SECRET)
    (tmp_path / "runs/loose.txt").write_text(SECRET)
    (tmp_path / "runs/link").symlink_to(tmp_path / "outside")
    (tmp_path / "runs/up").symlink_to(tmp_path)
    return tmp_path / "runs"


@pytest.fixture(scope="module")
def page(root):
    with serving(root) as served:
        yield served


def refused(answer, *statuses):
    status, headers, text = answer
    assert status in (statuses or range(400, 500)), (status, text)
    assert SECRET not in text
    assert "Traceback" not in text
    assert ".py" not in text
    assert len(text.strip().splitlines()) <= 1
    if "content-security-policy" in headers:
        assert "default-src 'none'" in headers["content-security-policy"]


def test_the_list_and_one_run(page):
    status, _, text = page.ask("/api/runs")
    runs = {run["id"]: run for run in json.loads(text)["runs"]}
    assert status == 200
    assert set(runs) == {"a", "deep/er/b c"}
    assert (runs["a"]["status"], runs["a"]["step"], runs["a"]["loss"]) == ("done", 49, 0.02)
    assert (runs["deep/er/b c"]["status"], runs["deep/er/b c"]["reason"]) == ("failed", "why")
    status, _, text = page.ask("/view?run=deep%2Fer%2Fb%20c")
    assert status == 200
    assert 'data-run="deep/er/b c"' in text
    answer = json.loads(page.ask("/api/view?run=a&run=deep/er/b+c&key=loss/step&key=nothing")[2])
    assert [run["label"] for run in answer["runs"]] == ["a", "deep/er/b c"]
    assert [panel["id"] for panel in answer["panels"]] == ["losses", "ranks"]
    curves = answer["data"]["loss/step"]["curves"]
    assert [curve["run"] for curve in curves] == [0, 1]
    assert curves[0]["raw"]["y"] == pytest.approx([1 / (step + 1) for step in range(50)], rel=1e-5)
    again = json.loads(page.ask(f"/api/view?run=a&run=deep/er/b+c&key=loss/step&since={answer['version']}")[2])
    assert "data" not in again  # nothing new
    part = json.loads(page.ask("/api/view?run=a&key=loss/step&low=10&high=20")[2])["data"]["loss/step"]["curves"][0]
    assert part["raw"]["x"] == list(range(9, 22))
    assert "The loss went from 1 to 0.02" in page.ask("/api/findings?run=a")[2]
    assert page.ask("/assets/page.css")[0] == 200


def test_a_folder_that_is_a_run(root, serve):
    page = serve(root / "a")
    (run,) = json.loads(page.ask("/api/runs")[2])["runs"]
    assert (run["id"], run["label"]) == (".", "a")
    assert page.ask("/view?run=.")[0] == 200


def test_names_from_runs_are_escaped(tmp_path, serve):
    page = serve(tmp_path)
    make_run(tmp_path / "a")
    make_run(tmp_path / EVIL)
    for target in (f"/view?run={quote(EVIL)}", "/view?run=a", "/"):
        assert "<img" not in page.ask(target)[2]
    found = json.loads(page.ask("/api/details?run=a")[2])
    assert "<img" not in found["bottom"]
    assert "&lt;img" in found["bottom"]


OUTSIDE = [
    "..", "../outside", "../secret.txt", "a/../../outside", "a/..", "./..", "/etc", "//etc/passwd", "link", "up", "up/outside",
    "up/runs/a", "loose.txt", "a/run.json", ".hidden", "nothing", "", "a\0", "a\n", "..\\outside", "a" * 2000, "a//../..", "~",
    "C:\\", "\ud800".encode("utf-8", "surrogatepass"), b"\xff\xfe", "%2e%2e/outside", "a/artifacts", "artifacts", "a/checkpoints",
]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE, ids=lambda name: repr(name)[:30])
def test_runs_outside_the_folder_are_not_there(page, name):
    for target in ("/view", "/api/view", "/api/findings", "/api/details"):
        refused(page.ask(f"{target}?run={quote(name, safe='')}"))
        if isinstance(name, str) and name.isprintable() and " " not in name and "\\" not in name:
            refused(
                page.ask(f"{target}?run=a&run={name}&key=loss/step"), *range(400, 500), *([200] if not name else [])
            )


PATHS = [
    "/etc/passwd", "/../secret.txt", "//secret.txt", "/assets/../../../secret.txt", "/assets/..%2f..%2fsecret.txt",
    "/assets/%2e%2e/page.py", "/assets/page.py", "/assets/view.js/..", "/assets/", "/assets", "/runs/a/metrics.db", "/a/run.json",
    "/static/view.js", "/api", "/api/../view", "/%00", "/view/../../etc/passwd", "/view?", "/view?run", "/api/view?run=a&points=1",
    "/api/view?run=a&points=nan", "/api/view?run=a&points=x", "/api/view?run=a&low=inf", "/api/view?run=a&low=%FF", "/" + "a" * 5000,
    "/api/view?" + "&".join(f"run=r{i}" for i in range(30)), "/api/view?run=a&" + "&".join(f"key=k{i}" for i in range(200)),
    "/api/view?run=a&key=" + "x" * 9000, "/api/view?" + "x" * 60_000, "*", "http://elsewhere/secret.txt",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path[:40])
def test_bad_paths_and_queries_are_refused(page, path):
    refused(page.ask(path))


def test_bad_methods_bodies_and_bytes_are_refused(page):
    for method in ("POST", "PUT", "DELETE", "PATCH", "TRACE", "OPTIONS"):
        refused(page.ask("/api/view?run=a", method, {"Content-Type": "application/json"}, b"{broken"), 405)
    # The server answers before it has read all of these headers and closes; some kernels then drop the answer.
    with suppress(ConnectionError):
        refused(page.ask("/api/runs", headers={"X-Large": "x" * 100_000}))
    for raw in (b"\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"{}\r\n\r\n"):
        with socket.create_connection((page.host, page.port), timeout=240) as connection:
            connection.sendall(raw)
            answer = connection.recv(10_000).decode("latin-1")
        assert answer.startswith("HTTP/1.1 4")
        assert "Traceback" not in answer
    assert page.ask("/api/runs")[0] == 200  # and goes on


BROKEN = {
    "run.json": ["{broken", "[]", '{"format": "other"}', '{"format": "excite-run", "version": 99}', ""],
    "config.json": ["{broken", "[]"],
    "metrics.db": ["not a database" * 50, ""],
    "artifacts/margins-inf-test.json": ["{broken", '{"values": [1]}'],
    "artifacts/wiring.json": ["{broken", "[]", '{"layers": [1], "groups": []}', '{"layers": 5}'],
}


def test_a_damaged_run_does_not_hide_the_others(tmp_path, serve):
    make_run(tmp_path / "good")
    cases = {f"bad{i}": case for i, case in enumerate((file, text) for file, all_ in BROKEN.items() for text in all_)}
    for name, (file, content) in cases.items():
        shutil.copytree(tmp_path / "good", tmp_path / name)
        (tmp_path / name / file).write_text(content)
    page = serve(tmp_path)
    listed = {run["id"]: run["status"] for run in json.loads(page.ask("/api/runs")[2])["runs"]}
    assert listed.pop("good") == "done"
    for name, (file, content) in cases.items():
        unreadable = file in ("run.json", "metrics.db")
        assert listed[name] == ("unreadable" if unreadable else "done"), content
        for target in ("/api/view", "/api/findings", "/api/details"):
            status, headers, text = page.ask(f"{target}?run={name}&key=loss/step")
            # Words come from the metrics alone; settings, wiring and margins are only read for the details.
            if target == "/api/details" or (unreadable and (file, target) != ("run.json", "/api/findings")):
                refused((status, headers, text), 422)
                assert str(tmp_path) not in text
            else:
                assert status == 200
    assert page.ask("/api/view?run=good")[0] == 200


def test_values_that_are_not_finite_are_valid_json(tmp_path, serve):
    with Run.create(tmp_path / "a", {}) as run:
        for step in range(30):
            run.log(step, {"loss/step": math.nan if step > 10 else 1.0, "rank/share/x": math.inf, "big": 1e308})
    page = serve(tmp_path)

    def refuse(text):
        raise AssertionError(text)

    answer = page.ask("/api/view?run=a&key=loss/step&key=rank/share&key=big")[2]
    curve = json.loads(answer, parse_constant=refuse)["data"]["loss/step"]["curves"][0]
    assert curve["raw"]["y"][11:] == [None] * 19
    (run,) = json.loads(page.ask("/api/runs")[2], parse_constant=refuse)["runs"]
    assert run["loss"] is None
    assert "not a finite number at step 11" in page.ask("/api/findings?run=a")[2]


def test_without_the_token_nothing_is_shown(root, serve):
    page = serve(root, token=TOKEN, host="0.0.0.0")
    for target in ("/", "/view?run=a", "/api/runs", "/assets/view.js", "/nothing"):
        refused(page.ask(target), 401)
        refused(page.ask(target, headers={"Authorization": f"Bearer {TOKEN}x"}), 401)
        refused(page.ask(target, headers={"Cookie": "excite-token=wrong; other=1"}), 401)
        refused(page.ask(target, headers={"Cookie": "\x7f;;=;"}), 401)
        refused(page.ask(f"{target}{'&' if '?' in target else '?'}token=wrong"), 403)
    assert page.ask("/api/runs", headers={"Authorization": f"Bearer {TOKEN}"})[0] == 200
    status, headers, _ = page.ask(f"/view?run=deep%2Fer%2Fb+c&token={TOKEN}")
    assert status == 303
    assert headers["location"] == "/view?run=deep%2Fer%2Fb+c"  # the token does not stay in the address
    assert {"HttpOnly", "SameSite=strict"} <= set(headers["set-cookie"].split("; "))
    cookie = headers["set-cookie"].split(";")[0]
    assert page.ask("/view?run=a", headers={"Cookie": cookie})[0] == 200
    assert page.ask(f"//elsewhere.org/?token={TOKEN}")[1]["location"].startswith("/elsewhere")


def test_other_names_for_this_machine_are_refused(page):
    for host in (
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "[evil]",
        "",
        "[::1",
    ):
        refused(page.ask("/api/runs", host=host or " "), 421, 400)
    for host in ("localhost", "LOCALHOST:99", "127.0.0.1:1", "[::1]:8765", "192.168.0.7"):
        assert page.ask("/api/runs", host=host)[0] == 200


def test_headers_keep_browsers_careful(page):
    for target in ("/", "/api/runs", "/assets/view.js", "/nothing"):
        _, headers, _ = page.ask(target)
        policy = headers["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "http" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers


def test_addresses_and_tokens_given_by_mistake(root, tmp_path):
    assert is_loopback("127.0.0.1")
    assert is_loopback("127.8.8.8")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example.org")
    with pytest.raises(InputError, match="16 to 200 letters"):
        serve_runs(root, token="short")
    with pytest.raises(ExciteError, match="there is no folder"):
        serve_runs(tmp_path / "nothing")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InputError, match="choose another --port"):
        serve_runs(root, port=taken.getsockname()[1])


def test_the_command_says_what_is_missing(root, excite, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "uvicorn", None)
    status, _, err = excite("serve", root)
    assert status == 1
    assert err.strip() == "excite: the live page needs uvicorn: pip install uvicorn"


def test_another_address_gets_a_token_by_itself(root, monkeypatch):
    told = []
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: [one.close() for one in sockets])
    serve_runs(root, host="0.0.0.0", port=0, announce=told.append)
    serve_runs(root, port=0, announce=told.append)
    serve_runs(root, port=0, token=TOKEN, announce=told.append)
    assert len(told[0].partition("?token=")[2]) >= 32
    assert "token" not in told[1]
    assert told[2].endswith(f"?token={TOKEN}")


@pytest.mark.slow
def test_fifty_killed_runs_and_the_page_keeps_serving(tmp_path):
    """Killed at random moments, also while the run is being made: what is there is served as it is, the rest is not there."""
    context = multiprocessing.get_context("fork")
    rng = np.random.default_rng(0)

    def write(go, path):
        go.wait()
        with Run.create(path, {}) as run:
            for step in itertools.count():
                run.log(step, {"loss/step": 1.0 / (step + 1), "rank/share/a": 0.5})
                time.sleep(0.0005)
                if step % 20 == 0:
                    run.flush()

    writers = []
    for i in range(50):  # forked before the server starts its threads; each waits for its turn
        go = context.Event()
        writers.append((go, context.Process(target=write, args=(go, tmp_path / f"run{i}"), daemon=True)))
        writers[-1][1].start()
    served = 0
    with serving(tmp_path) as page:
        for i, (go, process) in enumerate(writers):
            go.set()
            while (
                i % 2 and not (tmp_path / f"run{i}" / "run.json").exists()
            ):  # every other one is killed while it writes
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.3))
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            status, _, text = page.ask(f"/api/view?run=run{i}&key=loss/step")
            if (tmp_path / f"run{i}").exists():
                assert status == 200, text
                assert json.loads(text)["runs"][0]["status"] == "stale"
                served += 1
                with load_run(tmp_path / f"run{i}") as run:
                    if run.names():
                        curve = json.loads(text)["data"]["loss/step"]["curves"][0]["raw"]
                        assert curve["x"][-1] == run.series("loss/step")[0][-1]
            else:
                assert status == 404
            status, _, text = page.ask("/api/runs")
            assert status == 200
            assert "unreadable" not in text
    assert served >= 25
