"""Which of the undeliverable messages are meant: by task, queue, reason, id or age."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase

from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.headers import ENVELOPE, later_version
from celery_rabbitdelay.modules.envelope import Envelope
from celery_rabbitdelay.operations.undeliverable import UndeliverableMessage


@dataclass(frozen=True)
class Contents:
    """The tasks in a message; an envelope holds many.

    Attributes:
        tasks: Their names.
        ids: Their ids.
        queues: The queues that they were meant for, as far as the headers tell.
        messages: How many messages an envelope holds; None if the message is no envelope, or cannot
            be opened.
    """

    tasks: frozenset[str]
    ids: frozenset[str]
    queues: frozenset[str]
    messages: int | None = None

    @classmethod
    def of(cls, message: UndeliverableMessage) -> Contents:
        """Read them; never raises, whatever the message holds."""
        found, headers = message.found, message.headers
        exchange, key = map(headers.get, (header_names.EXCHANGE, header_names.ROUTING_KEY))
        queues = _texts(found.queue, key if exchange == "" else None)
        content_type = message.properties.get("content_type")
        if content_type != ENVELOPE or later_version(headers, content_type) is not None:
            return cls(_texts(found.task), _texts(found.task_id), queues)
        try:
            envelope = Envelope.unpack(message.body)
        except Exception:  # noqa: BLE001 - anybody may have written it
            return cls(_texts(found.task), _texts(found.task_id), queues)
        inner = [{**envelope.headers, **item.headers} for item in envelope.items]
        return cls(
            _texts(*(each.get("task") for each in inner)),
            _texts(*(each.get("id") for each in inner)),
            queues,
            len(inner),
        )


@dataclass(frozen=True)
class UndeliverableFilter:
    """Chooses messages; all conditions have to hold, and each of several values of one will do.

    Attributes:
        tasks: Names of tasks, in which ``*`` and ``?`` may stand. An envelope counts if one of its
            tasks has such a name.
        queues: Names of queues, likewise.
        ids: Ids of tasks.
        reasons: Parts of reasons; with ``*`` or ``?``, a pattern for the whole reason.
        older_than: How long a message is undeliverable at least. One that does not tell since when
            is neither older nor newer than anything.
        newer_than: For how long it is undeliverable at most.
    """

    tasks: Collection[str] = ()
    queues: Collection[str] = ()
    ids: Collection[str] = ()
    reasons: Collection[str] = ()
    older_than: timedelta | None = None
    newer_than: timedelta | None = None

    def matches(self, message: UndeliverableMessage, now: datetime | None = None) -> bool:
        """Return whether a message is meant.

        Args:
            message: The message.
            now: The time, aware; None for now.
        """
        if not self._matches_age(message.found.since, now):
            return False
        if self.reasons and not any(
            _matches_text(message.found.reason, each) for each in self.reasons
        ):
            return False
        if not (self.tasks or self.queues or self.ids):
            return True
        contents = Contents.of(message)
        return (
            _matches_names(contents.tasks, self.tasks)
            and _matches_names(contents.queues, self.queues)
            and (not self.ids or not contents.ids.isdisjoint(self.ids))
        )

    def _matches_age(self, since: datetime | None, now: datetime | None) -> bool:
        if self.older_than is None and self.newer_than is None:
            return True
        if since is None:
            return False
        age = (now or datetime.now(UTC)) - since
        return (self.older_than is None or age >= self.older_than) and (
            self.newer_than is None or age <= self.newer_than
        )


def _texts(*values: object) -> frozenset[str]:
    return frozenset(_known(values))


def _known(values: Collection[object]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str) and value:
            yield value


def _matches_names(names: Collection[str], patterns: Collection[str]) -> bool:
    return not patterns or any(
        name == pattern or fnmatchcase(name, _pattern(pattern))
        for name in names
        for pattern in patterns
    )


def _matches_text(text: str, wanted: str) -> bool:
    if "*" in wanted or "?" in wanted:
        return fnmatchcase(text, _pattern(wanted))
    return wanted in text


def _pattern(wanted: str) -> str:
    """Return a pattern in which only ``*`` and ``?`` are special: reasons contain brackets."""
    return wanted.replace("[", "[[]")
