"""Requests that run in a few threads."""

import asyncio
import json
import threading

import pytest
from benchmarks.live import make_run

from excite.report.live.sharing import PER_CLIENT, Sharing

GUARD = 240  # seconds against hanging


@pytest.fixture
def page(tmp_path, serve):
    make_run(tmp_path / "run", 3)
    return serve(tmp_path)


def test_equal_requests_are_computed_once(page, monkeypatch):
    """While one is computed, all that come share the next."""
    calls, busy, end = [], threading.Event(), threading.Event()

    def slow(root):
        calls.append(None)
        busy.set()
        assert end.wait(GUARD)
        return [len(calls)]

    monkeypatch.setattr("excite.report.live.app.sweeps", slow)

    async def body():
        sharing, results = Sharing(), []

        async def one(key):
            results.append(await sharing.get(key, "a", lambda: slow(None)))

        first = asyncio.ensure_future(one("k"))
        while not busy.is_set():
            await asyncio.sleep(0)
        others = [asyncio.ensure_future(one("k")) for _ in range(50)]
        await asyncio.sleep(0)
        end.set()
        await asyncio.gather(first, *others)
        return results, sharing

    results, sharing = asyncio.run(body())
    assert results == [[1], *[[2]] * 50]  # nobody who came later gets the first result
    assert not sharing._running
    assert not sharing._next
    assert not sharing._clients
    assert json.loads(page.ask("/api/tasks")[2]) == {"sweeps": [3]}


def test_one_address_does_not_take_all_threads():
    running, most, end = [], [], threading.Event()
    lock, full = threading.Lock(), threading.Event()

    def work():
        with lock:
            running.append(None)
            most.append(len(running))
            if len(running) == PER_CLIENT:
                full.set()
        assert end.wait(GUARD)
        with lock:
            running.pop()

    async def body():
        sharing = Sharing()
        many = [asyncio.ensure_future(sharing.get(i, "a", work)) for i in range(50)]
        while not full.is_set():
            await asyncio.sleep(0)
        assert await sharing.get("other", "b", lambda: "served") == "served"
        end.set()
        await asyncio.gather(*many)

    asyncio.run(body())
    assert max(most) == PER_CLIENT


def test_errors_of_a_computation_reach_all_who_share_it():
    async def body():
        sharing = Sharing()

        def fail():
            raise ValueError("why")

        found = await asyncio.gather(*(sharing.get(1, "a", fail) for _ in range(3)), return_exceptions=True)
        assert [str(error) for error in found] == ["why"] * 3
        assert await sharing.get(1, "a", lambda: "next") == "next"

    asyncio.run(body())
