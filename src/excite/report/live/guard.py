"""Who may ask: only hosts we go by, only with the token where there is one; and what browsers may do with answers."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "excite-token"
MAX_QUERY, MAX_HEADERS = 8000, 32_000
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def is_loopback(host: str) -> bool:
    """Whether `host` can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """Wraps the application. Without a token everyone who reaches the address may look, so that has to be loopback."""

    def __init__(self, app: ASGIApp, token: str | None = None, host: str = "127.0.0.1") -> None:
        self.app, self.token = app, token
        self.names = {"localhost", host.strip("[]").lower()}
        if not is_loopback(host):
            self.names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if "cache-control" not in headers:
                    headers["cache-control"] = "no-store"
            await send(message)

        refused = self._refusal(scope)
        await (refused or self.app)(scope, receive, sending)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if not self._knows(headers.get("host", "")):
            return _say(421, "this page does not go by that name: open it by the address that excite serve printed")
        query: bytes = scope.get("query_string", b"")
        if len(query) > MAX_QUERY:
            return _say(414, f"the query is longer than {MAX_QUERY} bytes")
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADERS:
            return _say(431, f"the headers are longer than {MAX_HEADERS} bytes")
        if self.token is None:
            return None
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        given = next((value for name, value in pairs if name == "token"), None)
        if given is not None and self._same(given):
            # From the address bar into a cookie, so that the token is neither bookmarked nor seen over a shoulder.
            rest = urlencode([pair for pair in pairs if pair[0] != "token"])
            path = "/" + scope["path"].lstrip("/\\")  # "//elsewhere" would lead to another host
            answer = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
            answer.set_cookie(COOKIE, given, httponly=True, samesite="strict", path="/")
            return answer
        if self._same(_bearer(headers)) or self._same(_cookie(headers)):
            return None
        return _say(401 if given is None else 403, "a token is needed: open the address that excite serve printed")

    def _knows(self, host: str) -> bool:
        """Names that lead here. Another name that a foreign page made to point here (DNS rebinding) is none of them;
        an address in digits cannot be such a name."""
        name = host.lower().rpartition("]")[0].strip("[") if host.startswith("[") else host.lower().partition(":")[0]
        if name in self.names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _same(self, given: str | None) -> bool:
        if given is None or self.token is None:
            return False
        return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), self.token.encode())


def _bearer(headers: Headers) -> str | None:
    kind, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" else None


def _cookie(headers: Headers) -> str | None:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return None if found is None else found.value


def _say(status: int, text: str) -> Response:
    return PlainTextResponse(text + "\n", status)
