"""The live page among hostile runs and with many clients: is everybody served, and how fast is the list of runs?

    python -m benchmarks.live [--runs 1500] [--clients 500] [--silent 200] [--seconds 240]

A folder of honest runs and thirty hostile ones (FIFOs, links and folders in place of files, views in place of tables, text
in place of numbers, 60,000 metric names, markup in every text) is served by `excite serve` on 127.0.0.1. The list is asked for
by one client: the first time, until every row was read, and again. Then every page of every hostile run is asked for. Then
silent connections are opened and kept, and all clients connect at once; each asks for the list, a page, its numbers and the
list again, over one connection. Everything is bounded by `--seconds`. Other work on the machine slows it down: the load is
printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from benchmarks.timing import machine
from excite.runs import Run

MARKUP = "<img src=x onerror=alert(1)><b>&\"'%{x}</script>"
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n)"
TARGETS = ("/view", "/api/view", "/api/findings", "/api/verdict", "/api/details")
Damage = Callable[[Path], object]


def make_run(path: Path, steps: int = 50) -> Path:
    with Run.create(path, {"seed": 0}) as run:
        for step in range(steps):
            run.log(step, {"loss/step": 1 / (step + 1), **{f"rank/share/fc{i}": 0.5 for i in range(20)}})
        run.write_json("wiring", {"layers": [], "groups": []})
        run.write_json("summary", {"arm": "a", "accuracy": {"test": 0.5}})
    return path


def make_margins() -> dict[str, object]:
    """Margins as they are stored."""
    import torch

    from excite.margin import margins

    model = torch.nn.Linear(2, 1)
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    return dict(margins(model, x, (model(x) > 0).flatten().long()).to_dict())


def _fifo(name: str) -> Damage:
    return lambda run: ((run / name).unlink(missing_ok=True), os.mkfifo(run / name))


def _folder(name: str) -> Damage:
    return lambda run: ((run / name).unlink(), (run / name).mkdir())


def _link(name: str) -> Damage:
    """Moves a file out of the run and leaves a link."""
    return lambda run: (
        (run / name).rename(run.parent / f".{run.name}"),
        (run / name).symlink_to(run.parent / f".{run.name}"),
    )


def _text(name: str, text: str | bytes) -> Damage:
    return lambda run: (run / name).write_bytes(text.encode() if isinstance(text, str) else text)


def _marker(**values: object) -> Damage:
    return lambda run: (run / "run.json").write_text(
        json.dumps({**json.loads((run / "run.json").read_text()), **values})
    )


def _sql(*statements: str) -> Damage:
    def damage(run: Path) -> None:
        database = sqlite3.connect(run / "metrics.db", isolation_level=None)
        for statement in statements:
            database.execute(statement)
        database.close()

    return damage


def _names(run: Path) -> None:
    database = sqlite3.connect(run / "metrics.db", isolation_level=None)
    database.execute(
        "INSERT INTO metrics WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 59999) "
        "SELECT 'probe/q' || i, 0, 0.5, 0.0 FROM n"
    )
    database.close()


def _half(run: Path) -> None:
    content = (run / "metrics.db").read_bytes()
    (run / "metrics.db").write_bytes(content[: len(content) // 2])


def _noise(run: Path) -> None:
    content = bytearray((run / "metrics.db").read_bytes())
    content[4096:] = bytes((37 * i) % 251 for i in range(len(content) - 4096))
    (run / "metrics.db").write_bytes(content)


def _markup(run: Path) -> None:
    """Markup in every text that a run has."""
    name = MARKUP.replace("/", "|")
    for file, value in {
        "config.json": {MARKUP: MARKUP, "nested": {MARKUP: [MARKUP]}},
        "environment.json": {MARKUP: MARKUP},
        "artifacts/summary.json": {"arm": MARKUP, "accuracy": {"test": 0.5, MARKUP: 1.0}},
        "artifacts/wiring.json": {
            "layers": [dict.fromkeys(("name", "kind", "in", "out", "parameters"), MARKUP) | {"name": name}],
            "groups": [
                {"channels": MARKUP, "producers": [MARKUP], "consumers": [MARKUP], "law": MARKUP, "why": MARKUP}
            ],
        },
    }.items():
        (run / file).write_text(json.dumps(value))
    margins = json.dumps(make_margins())
    for part in ("train", "test"):
        (run / f"artifacts/margins-2-{part}.json").write_text(margins)
    _marker(status="failed", reason=MARKUP)(run)
    database = sqlite3.connect(run / "metrics.db", isolation_level=None)
    for metric in (f"rank/share/{name}", f"rank/effective/{name}", f"rank/unit/{name}/3", f"{name}/{name}/{name}"):
        database.executemany(
            "INSERT INTO metrics VALUES (?, ?, ?, ?)",
            [(metric, step, 9.0 if step < 25 else 1.0, 1e9) for step in range(50)],
        )
    database.close()


HOSTILE: dict[str, Damage] = {
    **{f"fifo-{name.replace('/', '-')}": _fifo(name) for name in (
        "run.json", "config.json", "environment.json", "metrics.db", "metrics.db-wal", "lock", "artifacts/wiring.json",
        "artifacts/summary.json",
    )},
    **{f"link-{name}": _link(name) for name in ("run.json", "config.json", "metrics.db", "artifacts")},
    **{f"folder-{name}": _folder(name) for name in ("run.json", "metrics.db")},
    "view": _sql("DROP TABLE metrics", f"CREATE VIEW metrics AS {ENDLESS} SELECT i AS name, i AS step, i AS value, i AS time FROM n"),
    "virtual-table": _sql("DROP TABLE metrics", "CREATE VIRTUAL TABLE metrics USING fts5(name, step, value, time)"),
    "text-for-values": _sql("UPDATE metrics SET value = 'text'"),
    "text-for-a-step": _sql("INSERT INTO metrics VALUES ('loss/step', 'text', 0.0, 0.0)"),
    "infinite-times": _sql("UPDATE metrics SET time = 9e999"),
    "late-times": _sql("UPDATE metrics SET time = 1e300"),
    "bytes-for-a-name": _sql("INSERT INTO metrics VALUES (x'00ff', 0, 0.0, 0.0)"),
    "no-table": _sql("DROP TABLE metrics"),
    "half-a-database": _half,
    "noise": _noise,
    "many-names": _names,
    "deep-marker": _text("run.json", "[" * 100_000),
    "large-marker": _text("run.json", " " * 2_000_000 + "{}"),
    "list-for-a-status": _marker(status=["done"]),
    "deep-config": _text("config.json", '{"a":' * 900 + "1" + "}" * 900),
    "markup": _markup,
}  # fmt: skip


def make_hostile(root: Path) -> list[str]:
    """Thirty runs that do what they can; their names."""
    template = make_run(root / ".template")
    for name, damage in HOSTILE.items():
        shutil.copytree(template, root / name)
        damage(root / name)
    return list(HOSTILE)


class Client:
    """One connection that is kept."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port

    async def open(self) -> Client:
        self.reader, self.writer = await asyncio.open_connection(self.host, self.port)
        return self

    async def get(self, target: str) -> tuple[int, bytes]:
        self.writer.write(f"GET {target} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n\r\n".encode())
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].split("\r\n")[0])
        return int(head.split()[1]), await self.reader.readexactly(length)

    def close(self) -> None:
        self.writer.close()


async def listed(host: str, port: int) -> tuple[float, float, list[float], Counter[str]]:
    """Seconds of the first list, until all rows were read, and of lists after that; how the runs stand."""
    client = await Client(host, port).open()
    start = time.perf_counter()
    await client.get("/api/runs")
    first = time.perf_counter() - start
    while True:
        rows = json.loads((await client.get("/api/runs"))[1])["runs"]
        if all(row["status"] != "reading" for row in rows):
            break
    complete = time.perf_counter() - start
    again = []
    for _ in range(9):
        start = time.perf_counter()
        await client.get("/api/runs")
        again.append(time.perf_counter() - start)
    client.close()
    return first, complete, again, Counter(row["status"] for row in rows)


async def hostile_pages(host: str, port: int, names: list[str]) -> tuple[Counter[int], float]:
    """Answers to every request about every hostile run, and the longest time one took."""
    answers: Counter[int] = Counter()
    longest = 0.0
    client = await Client(host, port).open()
    for name in names:
        for target in TARGETS:
            start = time.perf_counter()
            status, _ = await client.get(f"{target}?run={quote(name)}&key=*")
            longest = max(longest, time.perf_counter() - start)
            answers[status] += 1
    client.close()
    return answers, longest


async def many_clients(host: str, port: int, count: int, silent: int) -> tuple[Counter[int], list[float], float]:
    """Answers to all clients, the seconds that each request took, and all together."""
    quiet = [await Client(host, port).open() for _ in range(silent)]
    answers: Counter[int] = Counter()
    times: list[float] = []

    async def one(i: int) -> None:
        client = await Client(host, port).open()
        for target in ("/api/runs", f"/view?run=run{i % 10}", f"/api/view?run=run{i % 10}&key=*", "/api/runs"):
            start = time.perf_counter()
            status, _ = await client.get(target)
            times.append(time.perf_counter() - start)
            answers[status] += 1
        client.close()

    start = time.perf_counter()
    failures = [
        error for error in await asyncio.gather(*map(one, range(count)), return_exceptions=True) if error is not None
    ]
    answers[0] += len(failures)  # no answer
    whole = time.perf_counter() - start
    for client in quiet:
        client.close()
    return answers, times, whole


def make_folder(root: Path, runs: int) -> list[str]:
    template = make_run(root / "run0")
    for i in range(1, runs):
        shutil.copytree(template, root / f"run{i}")
    return make_hostile(root)


def said(answers: Counter[int]) -> str:
    return ", ".join(f"{count:,} × {status or 'no answer'}" for status, count in sorted(answers.items()) if count)


async def measure(host: str, port: int, hostile: list[str], clients: int, silent: int) -> list[tuple[str, str]]:
    first, complete, again, standing = await listed(host, port)
    pages, longest = await hostile_pages(host, port, hostile)
    answers, times, whole = await many_clients(host, port, clients, silent)
    every = sorted(times)
    return [
        ("runs, unreadable runs", f"{standing.total():,}, {standing['unreadable']}"),
        ("first list", f"{first:.2f} s"),
        ("until every row was read", f"{complete:.2f} s"),
        ("list after that (median, longest of 9)", f"{statistics.median(again):.2f} s, {max(again):.2f} s"),
        (f"requests about {len(hostile)} hostile runs", f"{said(pages)}; longest {longest:.2f} s"),
        (f"{clients} clients at once, {silent} idle connections", said(answers)),
        ("time per request (median, longest)", f"{statistics.median(every):.2f} s, {every[-1]:.2f} s"),
        ("all requests", f"{whole:.1f} s, {len(times) / whole:.0f} answers per second"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1500)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--silent", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=240)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "runs"
        hostile = make_folder(root, options.runs)
        command = [sys.executable, "-m", "excite.cli.app", "serve", str(root), "--port", "0"]
        environment = {**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
        with open(Path(folder) / "log", "w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[1]
            port = int(address.rstrip("/").rpartition(":")[2])
            work = measure("127.0.0.1", port, hostile, options.clients, options.silent)
            rows = asyncio.run(asyncio.wait_for(work, options.seconds))
        finally:
            process.terminate()
            process.wait()
        lines = len((Path(folder) / "log").read_text().splitlines())
    print(f"{machine()}; load {os.getloadavg()[0]:.1f}\n")
    print("| measured | |\n| --- | --- |")
    for name, value in [*rows, ("lines logged by the server", str(lines))]:
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
