"""Occurrences of schedules: how the next one is found, and the task that is sent. Pure."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple, Self, get_args

from kombu import serialization
from kombu.exceptions import KombuError
from kombu.utils import json as kombu_json

from celery_rabbitdelay.exceptions import InvalidSchedule
from celery_rabbitdelay.levels.delay import MAX_DUE_MS
from celery_rabbitdelay.levels.headers import is_int
from celery_rabbitdelay.levels.recurrence import INVALID, Recurrence

#: The most characters of what an occurrence carries.
MAX_TEXT: Final = 4096

#: The longest jitter, in milliseconds: a day.
MAX_JITTER_MS: Final = 86_400_000

#: What becomes of an occurrence while a run of its schedule is still going.
Overlap = Literal["allow", "skip", "queue-one"]

#: An occurrence runs as long as the next one is not due; or however late it is.
UNTIL_NEXT: Final = -1
ALWAYS: Final = -2


class Occurrence(NamedTuple):
    """One instant of a schedule; its task carries it in a header.

    Attributes:
        name: The name of the schedule.
        instant_ms: The instant, in milliseconds since 1970-01-01 UTC.
        recurrence: When the schedule is due.
        catch_up_ms: How many milliseconds late it may still run; :data:`UNTIL_NEXT` or
            :data:`ALWAYS`.
        revision: Distinguishes what was put under the name, one after another.
        jitter_ms: It is due up to so many milliseconds later; how many, its id decides.
        overlap: What becomes of it while another run of the schedule is still going.
    """

    name: str
    instant_ms: int
    recurrence: Recurrence
    catch_up_ms: int
    revision: str
    jitter_ms: int = 0
    overlap: Overlap = "allow"

    @classmethod
    def of(cls, text: object) -> Self | None:
        """Read it from a header, which anybody may have written; None if that is invalid."""
        try:
            if not isinstance(text, str) or len(text) > MAX_TEXT:
                return None
            # A later version may say more.
            name, instant_ms, recurrence, catch_up_ms, revision, jitter_ms, overlap = json.loads(
                text
            )[:7]
            if not all(isinstance(each, str) for each in (name, revision)):
                return None
            f"{name}{revision}".encode()  # an id, and no half of a surrogate pair
            if not all(is_int(each, ALWAYS, MAX_DUE_MS) for each in (instant_ms, catch_up_ms)):
                return None
            if not is_int(jitter_ms, 0, MAX_JITTER_MS) or overlap not in get_args(Overlap):
                return None
            again = Recurrence.read(recurrence)
        except (*INVALID, TypeError, RecursionError):
            return None
        return cls(name, instant_ms, again, catch_up_ms, revision, jitter_ms, overlap)

    @property
    def text(self) -> str:
        """The text of the header: the inverse of :meth:`of`."""
        return json.dumps(self, separators=(",", ":"))

    @property
    def key(self) -> str:
        """The key of its task, which is the same for all occurrences of a schedule."""
        return key_of(self.name)

    @property
    def task_id(self) -> str:
        """The id of its task. That of a later instant is greater."""
        return f"{self.name}:{self.instant_ms:015d}:{self.revision}"

    @property
    def due_ms(self) -> int:
        """When it is due: its instant, and a jitter that is the same whoever computes it."""
        return self.instant_ms + zlib.crc32(self.task_id.encode()) % (self.jitter_ms + 1)

    def with_id(self, task_id: str) -> Occurrence | None:
        """Return the occurrence of the same schedule whose task has an id; None if none has."""
        instant = task_id.rpartition(":")[0].rpartition(":")[2]
        if not (instant.isascii() and instant.isdigit() and len(instant) == 15):
            return None
        found = self._replace(instant_ms=int(instant))
        return found if found.task_id == task_id else None

    def at(self, now_ms: int) -> tuple[bool, Occurrence | None]:
        """Return whether it still runs, and which one follows it.

        What follows is the first one after it that still runs.
        """
        following = self._at(self.recurrence.after(self.instant_ms))
        is_passed = following is not None and following.due_ms <= now_ms
        if self.catch_up_ms == ALWAYS:
            return True, following
        if self.catch_up_ms == UNTIL_NEXT:
            if not is_passed:
                return True, following
            latest = self._at(self.recurrence.latest(now_ms))
            later = [each for each in (following, latest) if each is not None]
            return False, max(later, key=lambda each: each.instant_ms)
        earliest_ms = now_ms - self.catch_up_ms
        since_ms = max(self.instant_ms, earliest_ms - self.jitter_ms - 1)
        return self.due_ms >= earliest_ms, self._at(self.recurrence.after(since_ms))

    def _at(self, instant_ms: int | None) -> Occurrence | None:
        return None if instant_ms is None else self._replace(instant_ms=instant_ms)


def key_of(name: str) -> str:
    """Return the key of the tasks of a schedule."""
    return f"schedule:{name}"


def definition_of(
    task: str,
    args: Iterable[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    serializer: str = "json",
) -> str:
    """Return what a schedule sends, as kombu's JSON.

    Arguments that JSON does not return as they were are written by the task's serializer.

    Raises:
        InvalidSchedule: The serializer cannot write the arguments, or JSON the options.
    """
    given: list[Any] = [list(args), dict(kwargs)]
    try:
        if _is_json(given, serializer):
            return kombu_json.dumps([task, *given, options])
        written = serialization.dumps(given, serializer)
        return kombu_json.dumps([task, written, None, options])
    except (TypeError, ValueError, KombuError) as error:
        raise InvalidSchedule(
            (*given, options), f"takes arguments that {serializer} can write: {error}"
        ) from None


def _is_json(given: list[Any], serializer: str) -> bool:
    try:
        read = kombu_json.loads(kombu_json.dumps(given))
        return serializer == "json" or repr(read) == repr(given)
    except (TypeError, ValueError):
        return False


class Definition(NamedTuple):
    """What a schedule sends.

    Attributes:
        task: The name of the task.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        options: Further options of the send.
    """

    task: str
    args: list[Any]
    kwargs: dict[str, Any]
    options: dict[str, Any]

    @classmethod
    def of(cls, text: str, accept: Iterable[str]) -> Self | None:
        """Read it; None if Redis has lost it, or this program cannot read it.

        Args:
            text: What :func:`definition_of` has returned.
            accept: Celery's ``accept_content``, for arguments that are not JSON.
        """
        try:
            task, args, kwargs, options = kombu_json.loads(text)
            if kwargs is None:
                content_type, encoding, body = args
                accepted = serialization.prepare_accept_content(accept)
                args, kwargs = serialization.loads(body, content_type, encoding, accepted)
        except Exception:  # noqa: BLE001 - decoders of any type
            return None
        return cls(task, args, kwargs, options)
