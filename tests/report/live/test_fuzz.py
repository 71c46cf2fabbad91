"""Random damage of run folders and random requests: never an answer of 500 and more, never a list without the others."""

import http.client
import json
import os
import random
import shutil
import socket
import sqlite3
from contextlib import suppress
from urllib.parse import quote

import pytest
from benchmarks.live import MARKUP, make_hostile, make_run

SECRET = "a secret outside of the folder"
FILES = ("run.json", "config.json", "environment.json", "metrics.db", "metrics.db-wal", "metrics.db-shm", "metrics.db-journal", "lock",
         "artifacts/wiring.json", "artifacts/summary.json", "artifacts/margins-2-test.json", "artifacts", "checkpoints")  # fmt: skip
VALUES = (None, True, [], {}, "", "x", MARKUP, "\ud800", "\x00", -1, 1e308, float("nan"), float("inf"), 10**400, [[]], {"a": 1}, "9" * 999,
          "excite-run", 1, ["running"], {"layers": 5}, "running", "failed")  # fmt: skip
CELLS = (
    "NULL",
    "'text'",
    "x'ff00'",
    "9e999",
    "-9e999",
    "9223372036854775807",
    "-9223372036854775808",
    "1e300",
    "''",
    "'a/' || char(0)",
)
SCHEMA = "CREATE TABLE metrics (name, step, value, time, PRIMARY KEY (name, step)) WITHOUT ROWID"


def flip(rng, path):
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 4, 64)) if content else 0):
        content[rng.randrange(len(content))] = rng.randrange(256)
    path.write_bytes(content)


def cut(rng, path):
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content) + 1)])


def replace(rng, path):
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    kind = rng.choice(("fifo", "folder", "link", "loop", "socket", "nothing", "noise"))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(rng.choice(("/etc/passwd", "../../secret.json", "../good/metrics.db", "../good", "/dev/zero")))
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening, suppress(OSError):  # names are limited to 107 bytes
            listening.bind(str(path))
    elif kind == "noise":
        path.write_bytes(rng.randbytes(rng.choice((0, 10, 5000))))


def edit(rng, path):
    """Another value somewhere in a JSON file."""
    value = json.loads(path.read_text())
    place = value
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = rng.choice([*keys, "arm", "format"]) if isinstance(place, dict) else rng.choice(keys or [None])
        if key is None:
            break
        inner = place.get(key) if isinstance(place, dict) else place[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
            place[key] = rng.choice(VALUES)
            break
        place = inner
    path.write_text(json.dumps(value))


def query(rng, path):
    """Another value somewhere in the metrics, or another table."""
    others = [path.with_name(path.name + suffix) for suffix in ("-wal", "-shm", "-journal")]
    if any(other.is_symlink() or (other.exists() and not other.is_file()) for other in others):
        return  # SQLite would open a FIFO beside the database and wait for good
    database = sqlite3.connect(path, timeout=0, isolation_level=None)
    column = rng.choice(("name", "step", "value", "time"))
    some = rng.choice(("", " WHERE name = 'loss/step'", " WHERE step = 2"))
    database.execute(
        rng.choice(
            (
                f"UPDATE OR IGNORE metrics SET {column} = {rng.choice(CELLS)}{some}",
                f"UPDATE OR REPLACE metrics SET {column} = {rng.choice(CELLS)}{some}",
                f"INSERT OR REPLACE INTO metrics VALUES ('loss/step', {rng.choice(CELLS)}, {rng.choice(CELLS)}, {rng.choice(CELLS)})",
                f"ALTER TABLE metrics RENAME COLUMN {column} TO other",
                "ALTER TABLE metrics RENAME TO other",
                f"PRAGMA user_version = {rng.randrange(9)}",
                f"PRAGMA application_id = {rng.randrange(9)}",
            )
        )
    )
    if rng.random() < 0.3:
        database.execute("DROP TABLE IF EXISTS metrics")
        database.execute(
            rng.choice((SCHEMA, "CREATE VIEW metrics AS SELECT 1 AS name, 2 AS step, 3 AS value, 4 AS time"))
        )
        database.execute(f"INSERT OR IGNORE INTO metrics VALUES ({', '.join(rng.choice(CELLS) for _ in range(4))})")
    database.close()


def damage(rng, run):
    path = run / rng.choice(FILES)
    with suppress(OSError, ValueError, sqlite3.Error):  # damaged before in a way that this one cannot go on from
        action = rng.choice(
            (flip, cut, replace, edit if path.suffix == ".json" else query if path.suffix == ".db" else flip)
        )
        if action is replace or (path.is_file() and not path.is_symlink()):
            action(rng, path)


def target(rng, names):
    path = rng.choice(
        ("/view", "/api/view", "/api/findings", "/api/details", "/api/runs", "/api/tasks", "/", "/assets/view.js", "/x")
    )
    values = [
        *names,
        "..",
        ".",
        "",
        MARKUP,
        "\x00",
        "é",
        "*",
        "loss/step",
        "rank/share",
        "nan",
        "1e999",
        "-5",
        "60",
        "1e308",
        "0" * 500,
    ]
    keys = ("run", "key", "low", "high", "points", "since", "names", "token", MARKUP)
    pairs = [(rng.choice(("run", rng.choice(keys))), rng.choice(values)) for _ in range(rng.randrange(4))]
    if rng.random() < 0.7:
        pairs.append(("run", rng.choice(names)))
    return f"{path}?{'&'.join(f'{quote(key)}={quote(value)}' for key, value in pairs)}"


def noise(rng, page):
    """Bytes that are hardly a request."""
    line = rng.choice(
        (b"GET / HTTP/1.1\r\n", b"GET /api/runs HTTP/1.0\r\n", b"POST /view HTTP/1.1\r\nContent-Length: 5\r\n", b"")
    )
    text = bytearray(line + b"Host: 127.0.0.1\r\n\r\n" + rng.randbytes(rng.randrange(40)))
    for _ in range(rng.randrange(5)):
        text[rng.randrange(len(text))] = rng.randrange(256)
    with socket.create_connection((page.host, page.port), timeout=240) as connection, suppress(ConnectionError):
        connection.sendall(bytes(text))
        connection.shutdown(socket.SHUT_WR)
        if rng.random() < 0.5:  # or it leaves
            answer = connection.recv(100)
            assert not answer.startswith(b"HTTP/1.1 5"), text


def strict(text):
    def refuse(constant):
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def fuzz(tmp_path, page, seed, rounds):
    rng = random.Random(seed)
    root = tmp_path / "runs"
    names = ["one", "two", "good"]
    connection = http.client.HTTPConnection(page.host, page.port, timeout=240)

    def ask(path):
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status < 500, (seed, path, answer.status, text)
        assert SECRET not in text, (seed, path)
        assert str(tmp_path) not in text, (seed, path)
        if answer.status == 200 and path.startswith("/api"):
            return strict(text)
        return None

    for _ in range(rounds):
        for name in names[:2]:
            if rng.random() < 0.2:  # from the beginning
                shutil.rmtree(root / name, ignore_errors=True)
                shutil.copytree(tmp_path / "template", root / name)
            for _ in range(rng.randrange(3)):
                damage(rng, root / name)
        listed = {run["id"]: run for run in ask("/api/runs")["runs"]}
        assert listed["good"]["status"] == "done", seed
        assert listed["good"]["step"] == 4, seed
        for name in names[:2]:
            ask(f"{rng.choice(('/view', '/api/view', '/api/findings', '/api/details'))}?run={name}&key=*")
        for _ in range(3):
            ask(target(rng, names))
        noise(rng, page)
    connection.close()


@pytest.fixture
def prepared(tmp_path):
    make_run(tmp_path / "template", 5)
    (tmp_path / "secret.json").write_text(json.dumps({"format": "excite-run", "version": 1, "status": SECRET}))
    for name in ("one", "two", "good"):
        shutil.copytree(tmp_path / "template", tmp_path / "runs" / name)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_damage_and_random_requests(prepared, serve, seed):
    fuzz(prepared, serve(prepared / "runs"), seed, 25)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
def test_much_random_damage_and_many_random_requests(prepared, serve, seed):
    make_hostile(prepared / "runs")
    fuzz(prepared, serve(prepared / "runs"), seed, 150)
