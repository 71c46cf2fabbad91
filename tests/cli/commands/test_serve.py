"""`excite serve`"""

import webbrowser

import pytest

live = pytest.importorskip("excite.report.live")


def test_options_are_passed_on_and_the_address_is_announced(excite, monkeypatch):
    calls, opened = [], []

    def serve(runs, host, port, token, announce):
        calls.append((runs, host, port, token))
        announce("http://127.0.0.1:8765/")

    monkeypatch.setattr(live, "serve", serve)
    monkeypatch.setattr(webbrowser, "open", opened.append)
    status, out, err = excite("serve", "runs", "--port", "0", "--token", "secret", "--open")
    assert status == 0, err
    assert calls == [("runs", "127.0.0.1", 0, "secret")]
    assert out == "open http://127.0.0.1:8765/ (Ctrl-C stops the server)\n"
    assert opened == ["http://127.0.0.1:8765/"]
