"""The message headers that only the modules write and read."""

from __future__ import annotations

from typing import Final

from celery_rabbitdelay.levels import headers as header_names

#: The delay of a message for check-in: milliseconds, an integer or a numeric string. It is the
#: header of the delayed-message-exchange plugin.
X_DELAY: Final = "x-delay"

#: The version of the messages' format that a message needs: int; 1 if it is absent. See
#: :mod:`.version`.
VERSION: Final = "rabbitdelay-version"

#: See there.
EARLY: Final = header_names.EARLY

#: Why a module put the message into ``undeliverable``, in words. The broker gives no reason.
REASON: Final = "rabbitdelay-reason"

#: How often a message could not be published to its destination: int.
ATTEMPTS: Final = "rabbitdelay-attempts"

#: When that was tried first, int, milliseconds since 1970-01-01 UTC, and why it failed, in words.
FAILED_SINCE: Final = "rabbitdelay-failed-since"
FIRST_REASON: Final = "rabbitdelay-first-reason"

#: How often a message was taken out of ``undeliverable`` and published again: int. It stays until
#: the message reaches its destination.
REDRIVEN: Final = "rabbitdelay-redriven"
