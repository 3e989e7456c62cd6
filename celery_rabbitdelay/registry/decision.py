"""The question about a task that arrives, and the registry's answer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, NamedTuple

__all__ = [
    "COPY",
    "JOB",
    "KEY",
    "ONCE",
    "Arrival",
    "Decision",
    "Outcome",
    "Verdict",
    "registry_headers",
]

#: The headers of a message that the registry knows of. The name of the sent message, different for
#: each send of a task that has a key or is tracked: str.
COPY: Final = "rabbitdelay-copy"

#: The key, and the job, that the task was sent with: str.
KEY: Final = "rabbitdelay-key"
JOB: Final = "rabbitdelay-job"

#: Set if only the first message with the task's id may run: True; or the mark that this message has
#: left already, str.
ONCE: Final = "rabbitdelay-once"


class Verdict(Enum):
    """What becomes of a task that has arrived."""

    #: It runs.
    RUN = "run"

    #: It does not run: it was cancelled.
    CANCELLED = "cancelled"

    #: It does not run: its job was aborted, or was not committed in time.
    EXPIRED = "expired"

    #: It does not run: a newer task was sent under its key.
    SUPERSEDED = "superseded"

    #: It does not run, because another message of the same task does: the task was sent anew to run
    #: earlier, or twice under its key.
    REPLACED = "replaced"

    #: It does not run: a message with its id has arrived before, and it was sent with ``once``.
    DUPLICATE = "duplicate"

    #: It goes back into the levels, until a later due time or because its job is still open.
    LATER = "later"


class Outcome(Enum):
    """The state in which ``cancel`` or ``postpone`` found a task."""

    #: The task was waiting, and will not run, or not before.
    DONE = "done"

    #: The task has arrived at a worker already; the registry changed nothing. A worker that has not
    #: started it may still revoke it, as Celery does.
    RELEASED = "released"

    #: The task is not tracked. It will not run, or not before, unless it has arrived already.
    UNKNOWN = "unknown"

    #: The task was cancelled or superseded before; nothing was changed.
    CANCELLED = "cancelled"


class Arrival(NamedTuple):
    """A delayed task that is due and has arrived.

    Attributes:
        task_id: Its id.
        due_ms: When it was due, in milliseconds since 1970-01-01 UTC.
        copy: Its header :data:`COPY`; empty if it has none.
        job: Its header :data:`JOB`; empty if it has none.
        once: A word for where, and at which attempt, it arrives, if only the first arrival there
            may run; empty if each may.
        redelivered: Whether the broker has delivered this message before.
    """

    task_id: str
    due_ms: int
    copy: str = ""
    job: str = ""
    once: str = ""
    redelivered: bool = False

    @classmethod
    def of(cls, headers: Mapping[str, Any], due_ms: int, queue: str, redelivered: bool) -> Arrival:
        """Read it from the headers of a task's message, which any sender may have written."""
        retries = headers.get("retries")
        attempt = int(retries) if isinstance(retries, int) else 0
        task_id = _text(headers.get("id"))
        return cls(
            task_id,
            due_ms,
            _text(headers.get(COPY)),
            _text(headers.get(JOB)),
            f"{queue}:{attempt}" if task_id and _is_once(headers.get(ONCE)) else "",
            redelivered,
        )


class Decision(NamedTuple):
    """What becomes of an arrival.

    Attributes:
        verdict: What becomes of it.
        until_ms: With ``LATER``: until when, in milliseconds since 1970-01-01 UTC.
        is_new_due: With ``LATER``: whether ``until_ms`` is its new due time, because it was
            postponed; otherwise the task only asks again then.
    """

    verdict: Verdict
    until_ms: int = 0
    is_new_due: bool = False


def registry_headers(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a message's headers that the registry knows of."""
    return {name: headers[name] for name in (COPY, KEY, JOB, ONCE) if name in headers}


def _is_once(value: object) -> bool:
    return value is True or _text(value) != ""


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
