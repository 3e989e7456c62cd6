"""One instant of a schedule: what its message says, and which instant follows it. Pure."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, Self, get_args

from kombu.utils import json

from celery_rabbitdelay.app.instruments import counter, gauge
from celery_rabbitdelay.levels.delay import MAX_DUE_MS
from celery_rabbitdelay.levels.headers import MAX_COUNT, MAX_EXACT, is_int
from celery_rabbitdelay.schedules.recurrence import Recurrence

#: The most characters of what an occurrence's header says.
MAX_TEXT: Final = 16_384

#: The longest jitter, in milliseconds: a day.
MAX_JITTER_MS: Final = 86_400_000

#: What becomes of an occurrence while a run of its schedule is still going.
Overlap = Literal["allow", "skip", "queue-one"]

#: What has come runs, for all that was missed; or each runs, one after the other.
LAST: Final = -1
ALL: Final = -2

OCCURRENCES: Final = counter(
    "occurrences",
    "Occurrences of schedules that came, by what became of them: ran, cancelled, late, paused, "
    "overlapped; and those that did not come: sent again.",
    labels=("task", "fate"),
)
OVERDUE: Final = gauge(
    "schedules_overdue_seconds",
    "Seconds since the next occurrence of a schedule was due that has not come; of the schedule "
    "where that is longest.",
)

_NAME: Final = re.compile(r"[0-9a-f]{0,32}", re.ASCII)


class Occurrence(NamedTuple):
    """One instant of a schedule; a header of its message says it.

    Attributes:
        name: The name of the schedule.
        instant_ms: The instant, in milliseconds since 1970-01-01 UTC.
        recurrence: When the schedule is due.
        catch_up_ms: How many milliseconds late it may still run; :data:`LAST` or :data:`ALL`.
        jitter_ms: It is due up to so many milliseconds later; how many, its instant decides.
        overlap: What becomes of it while another run of the schedule is still going.
        options: The options of the task.
        order: Grows with each edit of the schedule.
        revision: Stands for all that was put.
        message: The name of the message.
        turns: How often it was put back.
        is_followed: Whether the message of the instant that follows it was published.
    """

    name: str
    instant_ms: int
    recurrence: Recurrence
    catch_up_ms: int
    jitter_ms: int = 0
    overlap: Overlap = "allow"
    options: Mapping[str, Any] = {}
    order: int = 0
    revision: str = ""
    message: str = ""
    turns: int = 0
    is_followed: bool = False

    @classmethod
    def of(cls, text: object) -> Self | None:
        """Read it from a header, which anybody may have written; None if that is invalid."""
        try:
            if not isinstance(text, str) or len(text) > MAX_TEXT:
                return None
            # A later version may say more.
            found = cls(*json.loads(text)[: len(cls._fields)])
            found = found._replace(recurrence=Recurrence.read(found.recurrence))
            found.task_id.encode()  # it is no half of a surrogate pair
            return found if found._is_valid else None
        except Exception:  # noqa: BLE001 - a stranger's text raises errors of any kind
            return None

    @property
    def _is_valid(self) -> bool:
        return (
            isinstance(self.name, str)
            and isinstance(self.options, dict)
            and all(_NAME.fullmatch(each) for each in (self.revision, self.message))
            and is_int(self.instant_ms, 0, MAX_DUE_MS)
            and is_int(self.catch_up_ms, ALL, MAX_DUE_MS)
            and is_int(self.jitter_ms, 0, MAX_JITTER_MS)
            and is_int(self.order, 0, MAX_EXACT)
            and is_int(self.turns, 0, MAX_COUNT)
            and self.overlap in get_args(Overlap)
        )

    @property
    def text(self) -> str:
        """The text of the header: the inverse of :meth:`of`."""
        return str(json.dumps(list(self), separators=(",", ":")))

    @property
    def task_id(self) -> str:
        """The id of its task."""
        return f"{self.name}:{self.instant_ms:015d}:{self.order}"

    @property
    def due_ms(self) -> int:
        """When it is due: its instant, and a jitter that is the same whoever computes it."""
        words = f"{self.name}:{self.instant_ms}".encode()
        return self.instant_ms + zlib.crc32(words) % (self.jitter_ms + 1)

    def at(self, now_ms: int) -> tuple[bool, int | None]:
        """Return whether it still runs, and the instant that follows it; None if none does.

        With :data:`LAST`, the first one that is still ahead follows, and with a number of
        milliseconds the first one that is not too late.
        """
        if self.catch_up_ms == ALL:
            return True, self.recurrence.after(self.instant_ms)
        is_last = self.catch_up_ms == LAST
        earliest_ms = now_ms + 1 if is_last else now_ms - self.catch_up_ms
        since_ms = max(self.instant_ms, earliest_ms - self.jitter_ms - 1)
        following = self.recurrence.after(since_ms)
        while following is not None and self._replace(instant_ms=following).due_ms < earliest_ms:
            following = self.recurrence.after(following)
        return is_last or self.due_ms >= earliest_ms, following
