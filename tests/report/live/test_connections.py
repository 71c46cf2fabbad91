"""Many clients, silent ones and slow ones: whoever asks is served."""

import asyncio
import socket
import threading
from collections import Counter

import pytest
from benchmarks.live import make_run, many_clients

from excite.report.live import app, connections

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


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /", b"GET / HTTP/1.1\r\nX: a", b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\nabc"],
    ids=["nothing", "a part of a line", "a part of the headers", "a part of the body"],
)
def test_a_request_that_does_not_come_is_not_waited_for(page, monkeypatch, sent):
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.1)
    answer = ended(connect(page, sent))  # TimeoutError where the connection stays open
    assert answer.startswith(b"HTTP/1.1 405 ") if sent.startswith(b"POST") else answer == b""


def test_a_request_byte_by_byte_has_as_long_as_any_other(page, monkeypatch):
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.1)
    connection = connect(page)
    with pytest.raises(ConnectionError):
        for _ in range(24_000):  # an endless header
            connection.sendall(b"X")
            threading.Event().wait(0.01)


def test_a_client_that_does_not_read_is_not_waited_for(page, monkeypatch):
    gone = threading.Event()
    original = connections.Connection._abort
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.1)
    monkeypatch.setattr(connections.Connection, "_abort", lambda self: (original(self), gone.set()))
    monkeypatch.setattr(app, "_asset_bytes", lambda name: b" " * 5_000_000)
    connection = connect(page, b"GET /assets/uplot.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert gone.wait(GUARD)
    assert len(ended(connection)) < 4_000_000  # not all of it


@pytest.mark.slow
def test_many_clients_at_once_are_all_served(page):
    answers, times, _ = asyncio.run(many_clients(page.host, page.port, 100, 70))
    assert answers == Counter({200: 400})
    assert len(times) == 400


@pytest.mark.slow
def test_five_hundred_clients_at_once_are_all_served(page):
    answers, _, _ = asyncio.run(many_clients(page.host, page.port, 500, 200))
    assert answers == Counter({200: 2000})
