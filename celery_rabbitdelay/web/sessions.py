"""Signed cookies, the tokens of forms, and the sessions that users have ended."""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from typing import Final, NamedTuple

from itsdangerous import BadData, Signer, URLSafeTimedSerializer

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.exceptions import RabbitDelayError
from celery_rabbitdelay.publishing.reading import Readings

logger = logging.getLogger(__name__)

#: The name of the cookie of a session.
COOKIE: Final = "rabbitdelay"

#: The cookie that the form for signing in is bound to. It is not the session's: a browser does not
#: send that one when it follows a link from elsewhere, and must not lose it then.
SIGN_IN_COOKIE: Final = f"{COOKIE}-sign-in"

#: The cookie that says who has signed in with this browser before.
KNOWN_COOKIE: Final = f"{COOKIE}-known"

#: Seconds for which each of them lasts; none counts as another.
LASTS: Final = {COOKIE: 12 * 3600, SIGN_IN_COOKIE: 12 * 3600, KNOWN_COOKIE: 90 * 86_400}

#: Seconds for which a process does not ask again which sessions others have ended.
FRESH: Final = 1.0


class Session(NamedTuple):
    """The session of one browser.

    Attributes:
        key: A random word, which the tokens of its forms are bound to.
        name: Who has signed in; empty if nobody.
        proof: What ties that to the password as it was then.
    """

    key: str
    name: str = ""
    proof: str = ""

    @classmethod
    def new(cls, name: str = "", proof: str = "") -> Session:
        """Return a session with a key of its own."""
        return cls(secrets.token_urlsafe(16), name, proof)


class Sessions:
    """Writes and reads cookies, and the tokens of forms.

    Args:
        secret: What signs them; None: a random one.
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
        """Return a session as the value of the cookie of a name."""
        return str(self._serializers[name].dumps(list(session)))

    def read(self, cookie: str | None, name: str = COOKIE, since: float = 0) -> Session | None:
        """Return the session of a cookie.

        None if it is too old, or was not written here under this name; or if it is a user's and
        older than ``since``, in seconds since 1970.
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
        """Return what ties a session to a password: another password ends it."""
        return self._proofs.get_signature(password_hash).decode()


class EndedSessions:
    """The sessions that ended before their time, because users have signed out.

    With a registry, all processes that serve the page know them, also after a restart. While Redis
    is away, a process knows those that it has ended itself, and those that it knew before. Without
    a registry, it does not accept sessions that are older than itself.

    Args:
        delays: The application's delays.

    Attributes:
        known_since: Since when they are known, in seconds since 1970.
    """

    def __init__(self, delays: RabbitDelay) -> None:
        self._delays = delays
        self._has_registry = delays.has_registry
        self.known_since = 0.0 if self._has_registry else time.time()
        self._own: dict[str, float] = {}
        self._all = Readings(self._look, FRESH)

    def has(self, session: Session) -> bool:
        """Return whether a session has ended."""
        if session.key in self._own:
            return True
        return self._has_registry and session.key in (self._all.latest().value or ())

    def add(self, session: Session) -> None:
        """End a session."""
        now = time.time()
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
            logger.warning("Other processes of the page do not know who has signed out: %s", error)

    def _look(self) -> frozenset[str]:
        store = self._delays.registry.store
        (found,) = store.commands(lambda pipe: pipe.zrangebyscore(self._key, time.time(), "+inf"))
        return frozenset(found)

    @property
    def _key(self) -> str:
        return self._delays.registry.names.only("signed-out")


def _named(session: Session, user: str) -> bytes:
    # A key has no colon, so that no two sessions and users make the same text.
    return f"{session.key}:{user}".encode("utf-8", "surrogatepass")
