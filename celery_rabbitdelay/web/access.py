"""Authenticate requests (sessions, cookies, form tokens), and harden every request and answer."""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections import deque
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final, NamedTuple, get_args
from urllib.parse import urlsplit

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from itsdangerous import BadData, Signer, URLSafeTimedSerializer
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.exceptions import RabbitDelayError
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.metrics.reading import Readings
from celery_rabbitdelay.web.options import DUMMY_HASH, Options, Role, User, is_password
from celery_rabbitdelay.web.site import Site

logger = logging.getLogger(__name__)

#: The headers of every answer: nothing is loaded from another origin, no inline scripts or styles,
#: no framing, no reading from another origin, and no caching.
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

#: The headers over HTTPS and on localhost. Elsewhere, browsers ignore the additional one and log an
#: error.
SECURE_HEADERS: Final = {**HEADERS, "Cross-Origin-Opener-Policy": "same-origin"}

#: The most wrong passwords for a name from one place, the seconds for which they count, and the
#: seconds between further attempts.
MOST_WRONG, WRONG_WITHIN, PAUSE = 10, 60.0, 1.0

#: How many wrong passwords are remembered; older ones are forgotten.
REMEMBERED: Final = 10_000

#: The most passwords that wait to be compared: about a second of work.
MOST_WAITING: Final = 5

#: Headers that proxies add. If only this machine is answered, requests with them are refused.
OF_PROXIES: Final = ("forwarded", "x-forwarded-", "via", "x-real-ip")

#: The name of the cookie of a session.
COOKIE: Final = "rabbitdelay"

#: The cookie that the sign-in form is bound to. The session's own cookie cannot serve: a browser
#: does not send that cookie when it follows a link from another site, and must not lose it then.
SIGN_IN_COOKIE: Final = f"{COOKIE}-sign-in"

#: The cookie that names the user who has signed in with this browser before.
KNOWN_COOKIE: Final = f"{COOKIE}-known"

#: The lifetime of each cookie, in seconds. A cookie is not accepted under another name.
LASTS: Final = {COOKIE: 12 * 3600, SIGN_IN_COOKIE: 12 * 3600, KNOWN_COOKIE: 90 * 86_400}

#: Seconds for which a process caches the list of ended sessions.
FRESH: Final = 1.0


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

        headers = Headers(scope=scope)
        is_https = self._options.https or scope.get("scheme") == "https"
        name = _name_of(headers.get("host", ""))
        is_secure = is_https or is_here(name) or name.endswith(".localhost")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURE_HEADERS if is_secure else HEADERS)
            await send(message)

        answer: ASGIApp = self._inner
        if len(headers.getlist("host")) != 1 or not self._is_own_name(name):
            answer = PlainTextResponse(
                "The page does not serve this host name; its option 'hosts' lists the names.", 421
            )
        elif scope["method"] not in ("GET", "HEAD") and is_from_elsewhere(headers):
            answer = PlainTextResponse("The request comes from another site's page.", 403)
        await answer(scope, receive, send_with_headers)

    def _is_own_name(self, name: str) -> bool:
        if self._options.hosts is not None:
            return name in {each.lower() for each in self._options.hosts}
        return not self._options.is_open or is_here(name)


def is_from_elsewhere(headers: Headers) -> bool:
    """Return whether another site's page has sent a request, by the browser's headers.

    Browsers send ``Sec-Fetch-Site`` over HTTPS and to localhost; otherwise ``Origin`` decides.
    Because of our ``Referrer-Policy``, our own forms have the origin ``null``; they carry tokens.
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


class Session(NamedTuple):
    """The session of one browser.

    Attributes:
        key: A random word; the tokens of the session's forms are bound to it.
        name: The user who has signed in; empty for none.
        proof: Ties the session to the user's password at sign-in.
    """

    key: str
    name: str = ""
    proof: str = ""

    @classmethod
    def new(cls, name: str = "", proof: str = "") -> Session:
        """Return a session with a new random key."""
        return cls(secrets.token_urlsafe(16), name, proof)


class Sessions:
    """Writes and reads signed cookies and form tokens.

    Args:
        secret: Signs cookies and tokens; None for a random secret.
    """

    def __init__(self, secret: str | None = None) -> None:
        secret, sha256 = secret or secrets.token_hex(32), hashlib.sha256
        options = {"digest_method": sha256}
        self._serializers = {
            name: URLSafeTimedSerializer(secret, salt=name, signer_kwargs=options) for name in LASTS
        }
        self._tokens = Signer(secret, salt="token", digest_method=sha256)
        self._proofs = Signer(secret, salt="proof", digest_method=sha256)

    def written(self, session: Session, name: str = COOKIE) -> str:
        """Return a session as a cookie's value.

        A cookie is valid only under the name that it was written for.
        """
        return str(self._serializers[name].dumps(list(session)))

    def read(self, cookie: str | None, name: str = COOKIE, since: float = 0) -> Session | None:
        """Return the session in a cookie.

        None if the cookie has expired, was not signed here under this name, or belongs to a user
        and is older than ``since`` (seconds since 1970).
        """
        try:
            found, written = self._serializers[name].loads(
                cookie or "", max_age=LASTS[name], return_timestamp=True
            )
            session = Session(*map(str, found))
        except (BadData, TypeError):
            return None
        return None if session.name and written.timestamp() < int(since) else session

    def token(self, session: Session, user: str) -> str:
        """Return the token for the forms of a user in a session."""
        return self._tokens.get_signature(_named(session, user)).decode()

    def is_token(self, token: str, session: Session, user: str) -> bool:
        """Return whether a form has the token of a user in a session."""
        return self._tokens.verify_signature(_named(session, user), token)

    def proof(self, password_hash: str) -> str:
        """Return a signature that ties a session to a password: a new password ends the session."""
        return self._proofs.get_signature(password_hash).decode()


class EndedSessions:
    """The sessions that users have ended by signing out.

    With a registry, all processes that serve the page share this list, and it survives restarts.
    While Redis is unavailable, a process uses its last reading and its own sign-outs. Without a
    registry, a process refuses all sessions that began before the process did.

    Args:
        delays: The application's delays.

    Attributes:
        known_since: Seconds since 1970; sessions that began earlier may have ended unnoticed.
    """

    def __init__(self, delays: RabbitDelay) -> None:
        self._delays = delays
        self._has_registry = delays.has_registry
        self.known_since = 0.0 if self._has_registry else wall_clock.ms() / 1000
        self._own: dict[str, float] = {}
        self._all = Readings(self._look, FRESH)

    def has(self, session: Session) -> bool:
        """Return whether a session has ended."""
        if session.key in self._own:
            return True
        return self._has_registry and session.key in (self._all.latest().value or ())

    def add(self, session: Session) -> None:
        """End a session."""
        now = wall_clock.ms() / 1000
        self._own = {key: until for key, until in self._own.items() if until > now}
        self._own[session.key] = until = now + LASTS[COOKIE]
        if not self._has_registry:
            return
        try:
            self._delays.registry.store.commands(
                lambda pipe: [
                    pipe.zremrangebyscore(self._key, "-inf", now),
                    pipe.zadd(self._key, {session.key: until}),
                    pipe.expire(self._key, LASTS[COOKIE]),
                ]
            )
        except RabbitDelayError as error:
            logger.warning(
                "rabbitdelay web: %r has signed out of this process only, because Redis does not "
                "answer: %s",
                session.name,
                error,
            )

    def _look(self) -> frozenset[str]:
        store = self._delays.registry.store
        (found,) = store.commands(
            lambda pipe: pipe.zrangebyscore(self._key, wall_clock.ms() / 1000, "+inf")
        )
        return frozenset(found)

    @property
    def _key(self) -> str:
        return self._delays.registry.names.only("signed-out")


def _named(session: Session, user: str) -> bytes:
    # A key has no colon, so no two pairs of session and user make the same text.
    return f"{session.key}:{user}".encode("utf-8", "surrogatepass")


class Visitor(NamedTuple):
    """The sender of a request.

    Attributes:
        user: The user; None if the sender is unknown.
        session: The browser's session.
        token: The token for the session's forms.
        is_new: Whether the browser does not have the session's cookie yet.
    """

    user: User | None
    session: Session
    token: str
    is_new: bool


class Access:
    """Identifies the sender of a request by a cookie, a proxy's header, a function or the address.

    Args:
        site: The options of the page, and the registry.

    Attributes:
        sessions: The cookies and tokens.
        ended: The sessions that users have ended.
    """

    def __init__(self, site: Site) -> None:
        self._options = site.options
        self.sessions = Sessions(site.options.secret)
        self.ended = EndedSessions(site.delays)
        self._wrong: deque[tuple[float, str, str]] = deque(maxlen=REMEMBERED)
        # One thread for known browsers and one for strangers, apart from all other threads.
        self._comparing = {is_known: CapacityLimiter(1) for is_known in (True, False)}

    async def visitor(self, request: Request) -> Visitor:
        """Return the sender of a request."""
        session = self.sessions.read(request.cookies.get(COOKIE), since=self.ended.known_since)
        if session is not None and session.name:
            has_ended = await run_in_threadpool(self.ended.has, session)
            session = None if has_ended else session
        is_new = session is None
        session = session or Session.new()
        user = await run_in_threadpool(self._user, request, session)
        token = self.sessions.token(session, user.name if user else "")
        return Visitor(user, session, token, is_new)

    def _user(self, request: Request, session: Session) -> User | None:
        if self._options.users is not None:
            return self._signed_in(session)
        if self._options.proxy_header is not None:
            return self._named_by_proxy(request, self._options.proxy_header)
        if self._options.identify is not None:
            return self._identified(request.scope)
        address = _client_of(request)
        through_proxy = any(name.startswith(OF_PROXIES) for name in request.headers)
        if address is None or not address.is_loopback or through_proxy:
            return None
        return User("local", self._options.loopback_role)

    def _signed_in(self, session: Session) -> User | None:
        known = (self._options.users or {}).get(session.name)
        if known is None or session.proof != self.sessions.proof(known["password"]):
            return None
        return User(session.name, "operator" if known.get("role") == "operator" else "viewer")

    def _named_by_proxy(self, request: Request, header: str) -> User | None:
        named, address = request.headers.getlist(header), _client_of(request)
        if address is None or not any(address in each for each in self._options.proxy_networks):
            return None
        # Of two headers, one may be the client's own.
        if len(named) != 1 or not (name := named[0].strip()):
            return None
        return User(name, "operator" if name in self._options.operators else "viewer")

    def _identified(self, scope: Scope) -> User | None:
        try:
            found = self._options.identify and self._options.identify(scope)
        except Exception:
            logger.exception(
                "rabbitdelay web: the function 'identify' has failed; the request is refused"
            )
            return None
        return found if isinstance(found, User) and found.role in get_args(Role) else None

    async def signed_in(
        self, name: str, password: str, address: str, known: Session | None
    ) -> Session:
        """Check a user's password and return a new session; this takes some tenths of a second.

        Passwords are compared one at a time. Wrong passwords lock no user out: after ten in a
        minute for a name from one place, one attempt a second is compared. A place is an address,
        or a browser in which the user has signed in before.

        Args:
            name: The user's name.
            password: The password.
            address: The address of the browser.
            known: The session of the last user of this browser; None for an unknown browser.

        Raises:
            HTTPException: Name or password is wrong (401), or too many attempts wait (429).
        """
        users = self._options.users or {}
        hashed = users[name]["password"] if name in users else DUMMY_HASH
        proof = self.sessions.proof(hashed)
        is_known = known is not None and (known.name, known.proof) == (name, proof)
        # All unknown names count as one name, so they cannot push known names out of the memory.
        place = (name if name in users else "", known.key if known and is_known else address)
        now, comparing = time.monotonic(), self._comparing[is_known]
        wrong = [at for at, *each in self._wrong if at > now - WRONG_WITHIN and (*each,) == place]
        is_late = len(wrong) >= MOST_WRONG and now - wrong[-1] < PAUSE
        if is_late or comparing.statistics().tasks_waiting >= MOST_WAITING:
            why = "Too many attempts at once: try again in a second."
            raise HTTPException(429, why, {"Retry-After": f"{PAUSE:.0f}"})
        # The attempt counts before it is compared, which also bounds simultaneous attempts.
        attempt = (now, *place)
        self._wrong.append(attempt)
        is_right = await run_sync(is_password, password, hashed, limiter=comparing)
        if not is_right or name not in users:
            logger.warning("rabbitdelay web: wrong password for %.100r from %s", name, address)
            raise HTTPException(401, "Name or password is wrong.")
        with suppress(ValueError):  # newer attempts have pushed it out
            self._wrong.remove(attempt)
        logger.info("rabbitdelay web: %r has signed in from %s", name, address)
        return Session.new(name, proof)


def is_here(name: str) -> bool:
    """Return whether a name or an address is this machine's loopback."""
    address = _address_of(name)
    return name == "localhost" or (address is not None and address.is_loopback)


def _address_of(text: str) -> IPv4Address | IPv6Address | None:
    """Parse an IP address; IPv4-mapped IPv6 becomes IPv4, and any other text None."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return (address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address


def _client_of(request: Request) -> IPv4Address | IPv6Address | None:
    return _address_of(request.client.host) if request.client else None
