"""Signatures of a message's destination and due time. Pure.

The signature is an HMAC with SHA-256 (RFC 2104) over the parts of a message that distribution and
workers trust: :attr:`.DelayHeaders.signed`; the two ids in :data:`SIGNED_PROPERTIES`; the headers
that the registry uses, if the task has any; and the body of an envelope, because the messages in it
may name other destinations. The signature does not cover the body and the user's headers of a
single task. The signed parts do not change in the levels, so the signature still verifies after
years, and after the message was moved to other levels.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Final

from celery_rabbitdelay.exceptions import InvalidSigningKey
from celery_rabbitdelay.levels.headers import ENVELOPES, REGISTRY, DelayHeaders, shortened
from celery_rabbitdelay.publishing.message import WaitingMessage

#: Minimum bytes of a key: as many as the hash (https://www.rfc-editor.org/rfc/rfc2104#section-3).
MIN_KEY_BYTES: Final = 32

#: The reason why a message without a valid signature is undeliverable.
NOT_SIGNED: Final = "it has no valid signature: see rabbitdelay_signing_key"

#: The version of the signature's format, with which every signature begins.
VERSION: Final = "1:"

#: The signed properties, which follow :attr:`.DelayHeaders.signed`; all are strings.
SIGNED_PROPERTIES: Final = ("correlation_id", "message_id")

#: Stands for a missing value.
_NOTHING: Final = "-"

#: The headers that the registry uses, in the order of the signature: the registry's own headers,
#: then Celery's headers that identify a task and its attempt.
_ASKED_WITH: Final = (*sorted(REGISTRY), "id", "retries", "replaced_task_nesting")


class SigningKeys:
    """One or more keys: the first key signs, and a signature by any of the keys is valid.

    Args:
        keys: A key, or several keys. A string is encoded in UTF-8.

    Raises:
        InvalidSigningKey: No key is given, or a key has fewer than :data:`MIN_KEY_BYTES` bytes.
    """

    __slots__ = ("_keys",)

    def __init__(self, keys: str | bytes | Sequence[str | bytes]) -> None:
        given = [keys] if isinstance(keys, str | bytes) else list(keys)
        if not given:
            raise InvalidSigningKey("at least one key is needed")
        self._keys = tuple(map(_checked, given))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._keys)} hidden)"

    def sign(self, message: WaitingMessage) -> WaitingMessage:
        """Return a message with its signature; call this after all other changes of the message.

        The message stays unsigned if a signed part has a wrong type.
        """
        return message.saying(signature=self.signature(*message))

    def signature(
        self, body: bytes, properties: Mapping[str, object], headers: DelayHeaders
    ) -> str | None:
        """Return the signature of a message; None if a signed part has a wrong type.

        Args:
            body: The message's body, signed only for an envelope.
            properties: The message's AMQP properties; only :data:`SIGNED_PROPERTIES` are signed.
            headers: The message's headers.
        """
        signed = _signed(body, properties, headers)
        return None if signed is None else _signature(self._keys[0], signed)

    def verifies(
        self, body: bytes, properties: Mapping[str, object], headers: DelayHeaders
    ) -> bool:
        """Return whether a message has a valid signature; never raises.

        The arguments are the same as for :meth:`signature`.
        """
        signed = _signed(body, properties, headers)
        if headers.signature is None or signed is None:
            return False
        found = headers.signature.encode("utf-8", "surrogatepass")
        # Compare with all keys, so that the time reveals nothing about them.
        valid = [hmac.compare_digest(found, _signature(key, signed).encode()) for key in self._keys]
        return any(valid)


def signed(message: WaitingMessage, keys: SigningKeys | None) -> WaitingMessage:
    """Sign a message if there are keys; return the message."""
    return message if keys is None else keys.sign(message)


def _checked(key: object) -> bytes:
    if isinstance(key, str):
        key = key.encode("utf-8", "surrogatepass")
    if not isinstance(key, bytes):
        raise InvalidSigningKey(f"must be text or bytes, not {type(key).__name__}")
    if len(key) < MIN_KEY_BYTES:
        raise InvalidSigningKey(
            f"it has {len(key)} bytes, and at least {MIN_KEY_BYTES} are needed. "
            "Make a key with: python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return key


def _signature(key: bytes, signed: bytes) -> str:
    return VERSION + hmac.digest(key, signed, "sha256").hex()


def _signed(body: bytes, properties: Mapping[str, object], headers: DelayHeaders) -> bytes | None:
    """Return the signed parts of a message in a fixed order; None if a property has a wrong type.

    Each value is preceded by its length, so that no two messages have the same bytes.
    """
    named = [properties.get(name) for name in SIGNED_PROPERTIES]
    if not all(value is None or isinstance(value, str) for value in named):
        return None
    parts = [
        _NOTHING if value is None else _part(str(value)) for value in (*headers.signed, *named)
    ]
    if headers.registry:
        values = {**headers.others, **headers.registry}
        parts += [_named(name, values[name]) for name in _ASKED_WITH if name in values]
    content_type = properties.get("content_type")
    if isinstance(content_type, str) and content_type.startswith(ENVELOPES):
        parts += (_part(content_type), sha256(body).hexdigest())
    return ",".join(parts).encode("utf-8", "surrogatepass")


def _part(text: str) -> str:
    return f"{len(text)}:{text}"


def _named(name: str, value: object) -> str:
    return _part(f"{name}={value}" if isinstance(value, str) else f"{name}:{shortened(value)}")
