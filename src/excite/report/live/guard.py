"""Access control of the live page: allowed host names, the access token, size limits and security headers."""

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
    """ASGI middleware that checks every request before the application sees it.

    Starlette's TrustedHostMiddleware allows listed names only; a page on 0.0.0.0 is also opened by any numeric address of
    the machine, which no list has.

    Args:
        app: The application.
        token: Access token; None for a page on a loopback address without one.
        host: Address that the server listens on.
    """

    def __init__(self, app: ASGIApp, token: str | None = None, host: str = "127.0.0.1") -> None:
        self.app, self.token = app, token
        self.names = {"localhost", host.strip("[]").lower()}
        if not is_loopback(host):
            self.names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the request, or refuses it."""
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
        if not self._allows_host(headers.get("host", "")):
            return _refuse(421, "unknown host name: open the address that excite serve printed")
        query: bytes = scope.get("query_string", b"")
        if len(query) > MAX_QUERY:
            return _refuse(414, f"the query is longer than {MAX_QUERY} bytes")
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADERS:
            return _refuse(431, f"the headers are longer than {MAX_HEADERS} bytes")
        if self.token is None:
            return None
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        in_query = next((value for name, value in pairs if name == "token"), None)
        if in_query is not None and self._is_token(in_query):
            # From the address bar into a cookie, so that the token is neither bookmarked nor visible on the screen.
            remaining_query = urlencode([pair for pair in pairs if pair[0] != "token"])
            path = "/" + scope["path"].lstrip("/\\")  # "//elsewhere" would lead to another host
            answer = RedirectResponse(path + (f"?{remaining_query}" if remaining_query else ""), 303)
            answer.set_cookie(COOKIE, in_query, httponly=True, samesite="strict", path="/")
            return answer
        if self._is_token(_bearer(headers)) or self._is_token(_cookie(headers)):
            return None
        return _refuse(
            401 if in_query is None else 403, "an access token is required: open the address that excite serve printed"
        )

    def _allows_host(self, host: str) -> bool:
        """Whether the Host header is allowed: a name of this server, or any numeric address.

        Another name that resolves to this server (DNS rebinding) is refused; a numeric address cannot be one.
        """
        name = host.lower().rpartition("]")[0].strip("[") if host.startswith("[") else host.lower().partition(":")[0]
        if name in self.names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_token(self, text: str | None) -> bool:
        if text is None or self.token is None:
            return False
        return hmac.compare_digest(text.encode("utf-8", "surrogatepass"), self.token.encode())


def _bearer(headers: Headers) -> str | None:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if scheme.lower() == "bearer" else None


def _cookie(headers: Headers) -> str | None:
    try:
        result = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return None if result is None else result.value


def _refuse(status: int, text: str) -> Response:
    return PlainTextResponse(text + "\n", status)
