"""A server of the live page in a thread of its own, asked over a real socket."""

import http.client
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from excite.runs import Run

pytest.importorskip("starlette")
uvicorn = pytest.importorskip("uvicorn")


@dataclass
class Served:
    host: str
    port: int

    @property
    def url(self):
        return f"http://{self.host}:{self.port}"

    def ask(self, target, method="GET", headers=None, body=None, host=None):
        """(status, headers, text); the target is sent as it is."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=240)
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        connection.putheader("Host", host or f"{self.host}:{self.port}")
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        found = answer.status, dict(answer.getheaders()), answer.read().decode()
        connection.close()
        return found


@contextmanager
def serving(root, token=None, host="127.0.0.1"):
    from excite.report.live import _listen
    from excite.report.live.app import make_app
    from excite.report.live.connections import configured

    listening = _listen("127.0.0.1", 0)
    server = uvicorn.Server(configured(make_app(root, token, host), log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Served("127.0.0.1", listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def serve():
    """`serve(root, token=..., host=...)` starts a server that ends with the test."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(serving(*args, **options))


SECRET = "a secret outside of the folder"


EVIL = "<img src=x onerror=alert(1)>"


def make_run(path, steps=50, status="done", **more):
    with Run.create(path, {"seed": 0, EVIL: EVIL}) as run:
        for step in range(steps):
            run.log(step, {"loss/step": 1 / (step + 1), f"rank/share/{EVIL}".replace("/>", ">"): 0.5, **more})
        run.close(status, "why" if status == "failed" else None)
    return path
