"""Find out who sends a request: by a cookie, a proxy's header, a function, or the address."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final, NamedTuple, get_args

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from celery_rabbitdelay.web.options import Identify, Options, Role, User
from celery_rabbitdelay.web.passwords import NOBODY, is_password
from celery_rabbitdelay.web.sessions import COOKIE, Session, Sessions

logger = logging.getLogger(__name__)

#: How many wrong passwords a name takes in so many seconds from one address.
MOST_WRONG, WRONG_WITHIN = 10, 60.0

#: How many wrong passwords are remembered; older ones are forgotten.
REMEMBERED: Final = 10_000

#: Headers that proxies add. Where only this machine may ask, nobody may ask through one.
OF_PROXIES: Final = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")


class Visitor(NamedTuple):
    """The sender of a request.

    Attributes:
        user: The user; None if nobody is signed in.
        session: The session of the browser.
        token: The token for its forms.
        is_new: Whether the browser does not have the cookie of its session yet.
    """

    user: User | None
    session: Session
    token: str
    is_new: bool


class Access:
    """Finds out who sends a request.

    Args:
        options: What is configured.

    Attributes:
        sessions: The cookies and tokens.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.sessions = Sessions(options.secret)
        self._wrong: deque[tuple[float, str, str]] = deque(maxlen=REMEMBERED)

    @property
    def has_sign_in(self) -> bool:
        """Whether users sign in here."""
        return self._options.users is not None

    async def visitor(self, request: Request) -> Visitor:
        """Return who sends a request."""
        session = self.sessions.read(request.cookies.get(COOKIE))
        is_new = session is None
        session = session or Session.new()
        user = await self._user(request, session)
        token = self.sessions.token(session, user.name if user else "")
        return Visitor(user, session, token, is_new)

    async def _user(self, request: Request, session: Session) -> User | None:
        options = self._options
        if options.users is not None:
            return self._signed_in(session)
        if options.proxy_header is not None:
            return self._named_by_proxy(request, options.proxy_header)
        if options.identify is not None:
            return await run_in_threadpool(_identified, options.identify, request.scope)
        address = _client_of(request.scope)
        through_proxy = any(name in request.headers for name in OF_PROXIES)
        if address is None or not address.is_loopback or through_proxy:
            return None
        return User("local", options.loopback_role)

    def _signed_in(self, session: Session) -> User | None:
        known = (self._options.users or {}).get(session.name)
        if known is None or session.proof != self.sessions.proof(known["password"]):
            return None
        return User(session.name, "operator" if known.get("role") == "operator" else "viewer")

    def _named_by_proxy(self, request: Request, header: str) -> User | None:
        named, address = request.headers.getlist(header), _client_of(request.scope)
        if address is None or not any(address in each for each in self._options.proxy_networks):
            return None
        # Two of them: one may be a client's own.
        if len(named) != 1 or not (name := named[0].strip()):
            return None
        return User(name, "operator" if name in self._options.operators else "viewer")

    def signed_in(self, name: str, password: str, address: str) -> Session:
        """Return the session of a user who signs in; it takes some tenths of a second.

        Raises:
            NotSignedIn: Name or password is wrong, or too many passwords were wrong lately.
        """
        users = self._options.users or {}
        # All unknown names are one, so that they push nothing out of the memory.
        counted = name if name in users else ""
        since = time.monotonic() - WRONG_WITHIN
        wrong = [each for each in self._wrong if each[0] > since and each[1:] == (counted, address)]
        if len(wrong) >= MOST_WRONG:
            raise NotSignedIn("Too many attempts: wait a minute.")
        hashed = users[name]["password"] if name in users else NOBODY
        if not is_password(password, hashed) or name not in users:
            self._wrong.append((time.monotonic(), counted, address))
            logger.warning("A wrong password for %.100r from %s", name, address)
            raise NotSignedIn("Name or password is wrong.")
        logger.info("%r has signed in from %s", name, address)
        return Session.new(name, self.sessions.proof(hashed))


class NotSignedIn(Exception):
    """Somebody cannot sign in, for the reason that is its text."""


def is_here(name: str) -> bool:
    """Return whether a name or an address reaches only this machine."""
    address = address_of(name)
    return name == "localhost" or (address is not None and address.is_loopback)


def address_of(text: str) -> IPv4Address | IPv6Address | None:
    """Return an address, one of IPv4 also where IPv6 stands for it; None if it is none."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return (address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address


def _identified(identify: Identify, scope: Mapping[str, Any]) -> User | None:
    """Return whom the application's function names; nobody if it fails."""
    try:
        found = identify(scope)
    except Exception:
        logger.exception("The function 'identify' has failed; the request is refused")
        return None
    return found if isinstance(found, User) and found.role in get_args(Role) else None


def _client_of(scope: Mapping[str, Any]) -> IPv4Address | IPv6Address | None:
    client = scope.get("client")
    return address_of(client[0]) if client else None
