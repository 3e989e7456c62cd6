"""Authenticate requests, refuse cross-site requests, and add security headers to responses."""

from __future__ import annotations

import base64
import hmac
import logging
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final, get_args

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from celery_rabbitdelay.web.options import Options, Role, User, hash_of

logger = logging.getLogger(__name__)

#: The security headers of every response: no content from other origins, no inline scripts or
#: styles, no framing, no reading by other origins, and no caching. With the referrer policy
#: ``no-referrer``, browsers would send ``Origin: null`` with our own forms.
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

#: The header that makes a browser ask for a name and a password; the browser sends both in UTF-8.
CHALLENGE: Final = {"WWW-Authenticate": 'Basic realm="celery_rabbitdelay", charset="UTF-8"'}

#: Headers that proxies add. A page that serves only this machine refuses requests with any of them.
OF_PROXIES: Final = ("forwarded", "x-forwarded-", "via", "x-real-ip")

#: The response to a request if no option identifies its user.
UNIDENTIFIED: Final = (
    "The page does not know you. An option of rabbitdelay_web identifies users: 'users' lists "
    "names and passwords, 'proxy_header' trusts a proxy's header, 'identify' is a function of the "
    "application. Without any of these options, the page serves only this machine, without a proxy."
)


class Shield:
    """Refuses requests for a foreign host name or from a foreign page; adds security headers.

    A foreign site can point its own host name to this machine (DNS rebinding). The browser then
    treats this page as part of that site, so the name in ``Host`` is checked.

    Args:
        inner: The wrapped application.
        options: The options of the page.
    """

    def __init__(self, inner: ASGIApp, options: Options) -> None:
        self._inner = inner
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        headers, answer = Headers(scope=scope), self._inner
        if len(headers.getlist("host")) != 1 or not self._is_own_name(headers["host"]):
            answer = PlainTextResponse(
                "The page does not serve this host name; its option 'hosts' lists the names.", 421
            )
        elif scope["method"] not in ("GET", "HEAD") and is_from_elsewhere(headers):
            answer = PlainTextResponse("The request comes from another site's page.", 403)
        await answer(scope, receive, send_with_headers)

    def _is_own_name(self, host: str) -> bool:
        name = _name_of(host)
        if self._options.hosts is not None:
            return name in {each.lower() for each in self._options.hosts}
        return not self._options.is_open or is_here(name)


def is_from_elsewhere(headers: Headers) -> bool:
    """Return whether another site's page has sent a request, according to the browser's headers.

    Browsers send ``Sec-Fetch-Site`` over HTTPS and to localhost; otherwise ``Origin`` decides. A
    request with neither header does not come from a browser.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site not in ("same-origin", "none")
    host = headers["host"].lower()
    return origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}")


def _name_of(host: str) -> str:
    """Return the name in the header ``Host``, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


class Access:
    """Identifies the user of a request by a password, a proxy's header, a function or the address.

    Args:
        options: The options of the page.
    """

    def __init__(self, options: Options) -> None:
        self._options = options

    async def user(self, request: Request) -> User:
        """Return the user who has sent a request.

        Raises:
            HTTPException: The user is unknown (401, 403).
        """
        if self._options.users is not None:
            return _with_password(request, self._options.users)
        user = await run_in_threadpool(self._identified, request)
        if user is None:
            raise HTTPException(403, UNIDENTIFIED)
        return user

    def _identified(self, request: Request) -> User | None:
        options, headers = self._options, request.headers
        if options.identify is not None:
            return self._named_by_function(request.scope)
        address = _address_of(request.client.host) if request.client else None
        if address is None:
            return None
        if options.proxy_header is not None:
            named = headers.getlist(options.proxy_header)
            is_trusted = any(address in each for each in options.proxy_networks)
            # If the header occurs twice, the client may have added one of the two.
            name = named[0].strip() if is_trusted and len(named) == 1 else ""
            role: Role = "operator" if name in options.operators else "viewer"
            return User(name, role) if name else None
        if not address.is_loopback or any(name.startswith(OF_PROXIES) for name in headers):
            return None
        return User("local", options.loopback_role)

    def _named_by_function(self, scope: Scope) -> User | None:
        try:
            found = self._options.identify and self._options.identify(scope)
        except Exception:
            logger.exception("rabbitdelay web: the function 'identify' has failed; request refused")
            return None
        return found if isinstance(found, User) and found.role in get_args(Role) else None


def _with_password(request: Request, users: Mapping[str, Mapping[str, str]]) -> User:
    """Return the user of a request with a name and a password."""
    name, password = _credentials_of(request)
    user = users.get(name, {"password": ""})
    if not hmac.compare_digest(hash_of(password), user["password"]):
        address = request.client.host if request.client else ""
        logger.warning("rabbitdelay web: wrong password for %.100r from %s", name, address)
        raise HTTPException(401, "Name or password is wrong.", CHALLENGE)
    return User(name, "operator" if user.get("role") == "operator" else "viewer")


def _credentials_of(request: Request) -> tuple[str, str]:
    """Return the name and the password of a request (RFC 7617).

    Raises:
        HTTPException: The request has none.
    """
    scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
    try:
        name, colon, password = base64.b64decode(encoded, validate=True).decode().partition(":")
    except ValueError:  # neither Base64 nor UTF-8
        colon = ""
    if scheme.lower() != "basic" or not colon:
        raise HTTPException(401, "Sign in with your name and password.", CHALLENGE)
    return name, password


def is_here(name: str) -> bool:
    """Return whether a host is ``localhost`` or a loopback address."""
    address = _address_of(name)
    return name == "localhost" or (address is not None and address.is_loopback)


def _address_of(text: str) -> IPv4Address | IPv6Address | None:
    """Parse an IP address; IPv4-mapped IPv6 becomes IPv4, and any other text None."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return (address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address
