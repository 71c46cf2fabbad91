"""The live page: `excite serve RUNS`. It uses starlette and uvicorn."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from excite.errors import ExciteError, InputError

PORT = 8765
_TOKEN = re.compile(r"[A-Za-z0-9._~-]{16,200}")


def serve(
    root: str | os.PathLike[str],
    host: str = "127.0.0.1",
    port: int = PORT,
    token: str | None = None,
    announce: Callable[[str], None] = print,
) -> None:
    """Serves the live page until interrupted.

    Args:
        root: Folder or URL of the runs.
        host: Address to listen on. Everyone on this machine can open a page on the loopback address; any other address
            requires a token.
        port: Port to listen on; 0 takes a free one.
        token: Access token; generated if omitted and required.
        announce: Called with the address to open, which includes the token.

    Raises:
        InputError: If the token is malformed or the address cannot be used.
        RunError: If `root` does not exist.
    """
    try:
        import uvicorn

        from excite.report.live.app import make_app, prepare
        from excite.report.live.connections import allow_many_files, configured
        from excite.report.live.guard import is_loopback
        from excite.report.live.mirroring import mirrored
    except ImportError as error:
        raise ExciteError(f"the live page needs {error.name}: pip install {error.name}") from error
    if token is not None and not _TOKEN.fullmatch(token):
        raise InputError("--token: expected 16 to 200 letters, digits, '.', '_', '~' or '-'; omit it to generate one")
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    allow_many_files()
    with mirrored(root) as folder:
        app = make_app(folder, token, host)
        listening = _listen(host, port)
        shown = f"[{host}]" if ":" in host else host
        announce(f"http://{shown}:{listening.getsockname()[1]}/" + (f"?token={token}" if token else ""))
        threading.Thread(target=prepare, daemon=True).start()
        with suppress(KeyboardInterrupt):
            uvicorn.Server(configured(app)).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET
    with suppress(ValueError):
        if ipaddress.ip_address(host).version == 6:
            family = socket.AF_INET6
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"cannot listen on {host} port {port}: {why}; choose another --port (0 takes a free one)"
        ) from error
