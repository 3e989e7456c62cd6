"""The message headers that only the modules write and read."""

from __future__ import annotations

from typing import Final

#: The delay of a message for check-in: milliseconds, an integer or a numeric string. It is the
#: header of the delayed-message-exchange plugin.
X_DELAY: Final = "x-delay"

#: The version of the messages' format that a message needs: int; 1 if it is absent. See
#: :mod:`.version`.
VERSION: Final = "rabbitdelay-version"

#: Marks a message that left the levels before it was due and was put back: a table with ``times``
#: (how often) and, if distribution gives it back to one queue, the ``exchange`` and the
#: ``routing-key`` that its consumer is to see.
EARLY: Final = "rabbitdelay-early"

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
