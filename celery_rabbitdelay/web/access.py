"""Find out who sends a request: by a cookie, a proxy's header, a function, or the address."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final, NamedTuple, get_args

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from celery_rabbitdelay.web.options import Identify, Role, User
from celery_rabbitdelay.web.passwords import NOBODY, is_password
from celery_rabbitdelay.web.sessions import COOKIE, EndedSessions, Session, Sessions
from celery_rabbitdelay.web.site import Site

logger = logging.getLogger(__name__)

#: The number of wrong passwords that are compared for a name from one place within a number of
#: seconds, and the seconds between two further ones.
MOST_WRONG, WRONG_WITHIN, PAUSE = 10, 60.0, 1.0

#: How many wrong passwords are remembered; older ones are forgotten.
REMEMBERED: Final = 10_000

#: How many passwords wait to be compared, at most: about a second of work.
MOST_WAITING: Final = 5

#: Headers that proxies add. Where only this machine may ask, nobody may ask through one.
OF_PROXIES: Final = ("forwarded", "x-forwarded-", "via", "x-real-ip")


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
        site: What is configured, and the registry.

    Attributes:
        sessions: The cookies and tokens.
        ended: The sessions that ended before their time.
    """

    def __init__(self, site: Site) -> None:
        self._options = site.options
        self.sessions = Sessions(site.options.secret)
        self.ended = EndedSessions(site.delays)
        self._wrong: deque[tuple[float, str, str]] = deque(maxlen=REMEMBERED)
        #: Apart from all other threads; those of browsers that are known apart from strangers'.
        self._comparing = {is_known: CapacityLimiter(1) for is_known in (True, False)}

    @property
    def has_sign_in(self) -> bool:
        """Whether users sign in here."""
        return self._options.users is not None

    async def visitor(self, request: Request) -> Visitor:
        """Return who sends a request."""
        session = self.sessions.read(request.cookies.get(COOKIE), since=self.ended.known_since)
        if session is not None and session.name:
            has_ended = await run_in_threadpool(self.ended.has, session)
            session = None if has_ended else session
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
        through_proxy = any(name.startswith(OF_PROXIES) for name in request.headers)
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

    async def signed_in(
        self, name: str, password: str, address: str, known: Session | None
    ) -> Session:
        """Return the session of a user who signs in; it takes some tenths of a second.

        Passwords are compared one at a time. Wrong ones lock nobody out: after ten in a minute for
        a name from one place, one a second is compared. A place is an address, or a browser in
        which the user has signed in before.

        Args:
            name: The user's name.
            password: The password.
            address: The address that it comes from.
            known: Who has signed in with this browser before; None for a stranger.

        Raises:
            NotSignedIn: Name or password is wrong.
            TooManyAttempts: It was not compared.
        """
        users = self._options.users or {}
        hashed = users[name]["password"] if name in users else NOBODY
        proof = self.sessions.proof(hashed)
        is_known = known is not None and (known.name, known.proof) == (name, proof)
        # All unknown names are one, so that they push nothing out of the memory.
        place = (name if name in users else "", known.key if known and is_known else address)
        now, comparing = time.monotonic(), self._comparing[is_known]
        wrong = [at for at, *each in self._wrong if at > now - WRONG_WITHIN and (*each,) == place]
        is_late = len(wrong) >= MOST_WRONG and now - wrong[-1] < PAUSE
        if is_late or comparing.statistics().tasks_waiting >= MOST_WAITING:
            raise TooManyAttempts("Too many attempts at once: try again in a second.")
        # It counts while it is compared as well, or many would be at the same time.
        attempt = (now, *place)
        self._wrong.append(attempt)
        is_right = await run_sync(is_password, password, hashed, limiter=comparing)
        if not is_right or name not in users:
            logger.warning("A wrong password for %.100r from %s", name, address)
            raise NotSignedIn("Name or password is wrong.")
        with suppress(ValueError):  # it is forgotten already
            self._wrong.remove(attempt)
        logger.info("%r has signed in from %s", name, address)
        return Session.new(name, proof)


class NotSignedIn(Exception):
    """Somebody cannot sign in, for the reason that is its text."""


class TooManyAttempts(NotSignedIn):
    """A password was not compared; it may be right."""


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
