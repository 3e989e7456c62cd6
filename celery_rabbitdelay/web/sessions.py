"""Signed cookies, and the tokens without which no form is accepted."""

from __future__ import annotations

import hashlib
import secrets
from typing import Final, NamedTuple

from itsdangerous import BadData, Signer, URLSafeTimedSerializer

#: Seconds for which a session lasts.
LASTS: Final = 12 * 3600

#: The name of the cookie.
COOKIE: Final = "rabbitdelay"


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
        self._serializer = URLSafeTimedSerializer(secret, salt="session", signer_kwargs=options)
        self._tokens = Signer(secret, salt="token", digest_method=sha256)
        self._proofs = Signer(secret, salt="proof", digest_method=sha256)

    def written(self, session: Session) -> str:
        """Return a session as the value of a cookie."""
        return str(self._serializer.dumps(list(session)))

    def read(self, cookie: str | None) -> Session | None:
        """Return the session of a cookie; None if it is too old, or was not written here."""
        if not cookie:
            return None
        try:
            return Session(*map(str, self._serializer.loads(cookie, max_age=LASTS)))
        except (BadData, TypeError):
            return None

    def token(self, session: Session, user: str) -> str:
        """Return the token for the forms of a user in a session."""
        return self._tokens.get_signature(_named(session, user)).decode()

    def is_token(self, token: str, session: Session, user: str) -> bool:
        """Return whether a form has the token of a user in a session."""
        return self._tokens.verify_signature(_named(session, user), token)

    def proof(self, password_hash: str) -> str:
        """Return what ties a session to a password: another password ends it."""
        return self._proofs.get_signature(password_hash).decode()


def _named(session: Session, user: str) -> bytes:
    # A key has no colon, so that no two sessions and users make the same text.
    return f"{session.key}:{user}".encode("utf-8", "surrogatepass")
