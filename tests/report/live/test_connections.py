"""Many clients, silent ones and slow ones: whoever asks is served."""

import asyncio
import json
import socket
import threading
from collections import Counter

import pytest
from benchmarks.live import make_run, many_clients

from excite.report.live import connections
from excite.report.live.sharing import PER_CLIENT, Sharing

GUARD = 240  # seconds against hanging


@pytest.fixture
def page(tmp_path, serve):
    for i in range(10):
        make_run(tmp_path / f"run{i}", 3)
    return serve(tmp_path)


def connect(page, sent=b""):
    connection = socket.create_connection((page.host, page.port), timeout=GUARD)
    connection.sendall(sent)
    return connection


def ended(connection):
    """Reads until the other side closes; what came."""
    content = b""
    try:
        while part := connection.recv(1 << 20):
            content += part
    except ConnectionError:
        pass
    connection.close()
    return content


def test_silent_connections_lock_nobody_out(page):
    silent = [connect(page, sent) for sent in (b"", b"GET / HTTP/1.1\r\n") for _ in range(50)]
    assert page.ask("/api/runs")[0] == 200
    for one in silent:
        one.close()


def test_a_new_connection_takes_the_place_of_an_idle_one(page, monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 8)
    silent = [connect(page) for _ in range(64)]
    for _ in range(3):
        assert page.ask("/api/runs")[0] == 200
    assert [ended(one) for one in silent[:56]] == [b""] * 56  # the oldest are closed
    for one in silent[56:]:
        one.close()


def test_without_an_idle_connection_the_next_is_refused(page, monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 1)
    busy, end = threading.Event(), threading.Event()

    def slow(root):
        busy.set()
        assert end.wait(GUARD)
        return []

    monkeypatch.setattr("excite.report.live.app.sweeps", slow)
    one = connect(page, b"GET /api/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    assert busy.wait(GUARD)
    assert b" 503 " in ended(connect(page)).splitlines()[0]
    end.set()
    assert b" 200 " in ended(one).splitlines()[0]


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /", b"GET / HTTP/1.1\r\nX: a", b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\nabc"],
    ids=["nothing", "a part of a line", "a part of the headers", "a part of the body"],
)
def test_a_request_that_does_not_come_is_not_waited_for(page, monkeypatch, sent):
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.1)
    ended(connect(page, sent))  # or the test hangs


def test_a_request_byte_by_byte_has_as_long_as_any_other(page, monkeypatch):
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.1)
    connection = connect(page)
    with pytest.raises(ConnectionError):
        for _ in range(24_000):  # an endless header
            connection.sendall(b"X")
            threading.Event().wait(0.01)


def test_a_client_that_does_not_take_its_answer_is_not_waited_for(page, monkeypatch):
    gone = threading.Event()
    original = connections.Connection._abort
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.1)
    monkeypatch.setattr(connections.Connection, "_abort", lambda self: (original(self), gone.set()))
    connection = connect(page, b"GET /assets/plotly.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert gone.wait(GUARD)
    assert len(ended(connection)) < 4_000_000  # not all of it


def test_many_clients_at_once_are_all_served(page):
    answers, times, _ = asyncio.run(many_clients(page.host, page.port, 100, 70))
    assert answers == Counter({200: 400})
    assert len(times) == 400


@pytest.mark.slow
def test_five_hundred_clients_at_once_are_all_served(page):
    answers, _, _ = asyncio.run(many_clients(page.host, page.port, 500, 200))
    assert answers == Counter({200: 2000})


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
