"""What every request has to have, and what every answer has: the outermost layer."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from celery_rabbitdelay.web.access import is_here
from celery_rabbitdelay.web.options import Options

#: The headers of every answer. Nothing comes from elsewhere, no script or style stands in a page,
#: nobody frames it or reads it from another origin, and no cache keeps it.
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

#: The same where browsers heed it: over HTTPS, and on this machine. Elsewhere they log an error.
SECURE_HEADERS: Final = {**HEADERS, "Cross-Origin-Opener-Policy": "same-origin"}


class Shield:
    """Refuses requests that come under a foreign name or from a foreign page; adds headers.

    A page of a stranger can let its own name point to this machine (DNS rebinding). The browser
    then takes it for that stranger's, so the name in ``Host`` is checked.

    Args:
        inner: The application behind it.
        options: What is configured.
    """

    def __init__(self, inner: ASGIApp, options: Options) -> None:
        self._inner = inner
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return

        headers = Headers(scope=scope)
        added = SECURE_HEADERS if self._is_secure(scope, headers) else HEADERS

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(added)
            await send(message)

        answer: ASGIApp = self._inner
        if not self._is_own_name(headers.getlist("host")):
            answer = PlainTextResponse(
                "The page is not served under this name; its option 'hosts' lists the names.", 421
            )
        elif scope["method"] not in ("GET", "HEAD") and is_from_elsewhere(headers):
            answer = PlainTextResponse("The request comes from another page.", 403)
        await answer(scope, receive, send_with_headers)

    def _is_own_name(self, hosts: list[str]) -> bool:
        if len(hosts) != 1:
            return False
        name = _name_of(hosts[0])
        if self._options.hosts is not None:
            return name in {each.lower() for each in self._options.hosts}
        return not self._options.is_open or is_here(name)

    def _is_secure(self, scope: Scope, headers: Headers) -> bool:
        if self._options.https or scope.get("scheme") == "https":
            return True
        name = _name_of(headers.get("host", ""))
        return is_here(name) or name.endswith(".localhost")


def is_from_elsewhere(headers: Headers) -> bool:
    """Return whether a browser says that another page has sent a request.

    ``Sec-Fetch-Site`` is the browser's own word, where it sends it: over HTTPS, and to localhost.
    Because of our ``Referrer-Policy``, the origin of our own forms is ``null``; those have tokens.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site != "same-origin"
    if origin is None or origin == "null":
        return False
    try:
        return urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
    except ValueError:
        return True


def _name_of(host: str) -> str:
    """Return the name in the header ``Host``, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
