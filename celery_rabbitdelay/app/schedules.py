"""``app.rabbitdelay.schedules``: tasks that run again and again, without a process for it.

The next occurrence of a schedule is a task that waits in the levels. When it arrives, the worker
first publishes the one after it, and then runs it; see ``worker/occurrences.py``. All occurrences
of a schedule have one key, so an edit supersedes what waits, and each has an id of its own, under
which it runs once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, Literal, NamedTuple, get_args

from celery.result import AsyncResult
from celery.utils.time import LocalTimezone

from celery_rabbitdelay.app.instruments import OCCURRENCES
from celery_rabbitdelay.exceptions import InvalidSchedule, RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import Delay, instant_of, milliseconds, milliseconds_of
from celery_rabbitdelay.levels.recurrence import Recurrence
from celery_rabbitdelay.levels.schedule import (
    ALWAYS,
    MAX_JITTER_MS,
    MAX_TEXT,
    UNTIL_NEXT,
    Definition,
    Occurrence,
    Overlap,
    definition_of,
    key_of,
)
from celery_rabbitdelay.registry.registry import CLOSED, NOTE_MS, Registry
from celery_rabbitdelay.registry.schedules import Fate, NotedSchedule

logger = logging.getLogger(__name__)

#: The options of a send that a schedule takes. Others concern one message only.
OPTIONS: Final = frozenset(
    {"queue", "exchange", "routing_key", "priority", "serializer", "headers", "ignore_result"}
    | {"time_limit", "soft_time_limit", "shadow", "argsrepr", "kwargsrepr", "link", "link_error"}
    | {"retry", "retry_policy", "compression", "delivery_mode", "mandatory"}
)

#: The most bytes of a name: the id of a task, which AMQP has to carry, has 255.
MAX_NAME: Final = 226

#: How many instants are looked at to find the shortest gap between two.
INSTANTS: Final = 50

#: The most instants of one backfill, and the delay of their tasks: as the registry only decides
#: about tasks that were delayed.
MAX_BACKFILL: Final = 10_000
AT_ONCE: Final = 0.1

#: Milliseconds that an occurrence may be late before it is sent again, at first; then twice as long
#: each time.
HEAL_AFTER_MS: Final = 60_000

CatchUp = Literal["last", "all"]


class Schedule(NamedTuple):
    """A schedule.

    Attributes:
        name: Its name.
        task: The name of the task that it sends; empty if Redis has lost it, or this program cannot
            read its arguments.
        args: The task's positional arguments.
        kwargs: Its keyword arguments.
        options: The options of the task.
        next_at: When it is due next.
        is_paused: Whether its occurrences do not run.
        recurrence: When it is due.
        overlap: What becomes of an occurrence while another run still goes.
        catch_up: Which occurrences run that were missed: "last", "all", or seconds.
        jitter: By how many seconds an occurrence is late on purpose, at most.
        last: When the last occurrence was due that has come, when it came, and what became of it;
            None if that is not known.
    """

    name: str
    task: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: dict[str, Any]
    next_at: datetime
    is_paused: bool
    recurrence: Recurrence
    overlap: Overlap
    catch_up: CatchUp | float
    jitter: float
    last: tuple[datetime, datetime, Fate] | None

    @classmethod
    def of(cls, noted: NotedSchedule, sent: Definition | None) -> Schedule:
        """Return what is noted about it, with what it sends, if that is known."""
        occurrence, last = noted.occurrence, noted.last
        sent = sent or Definition("", [], {}, {})
        return cls(
            occurrence.name,
            sent.task,
            tuple(sent.args),
            sent.kwargs,
            sent.options,
            instant_of(occurrence.due_ms),
            noted.is_paused,
            occurrence.recurrence,
            occurrence.overlap,
            _CATCH_UPS.get(occurrence.catch_up_ms, occurrence.catch_up_ms / 1000),
            occurrence.jitter_ms / 1000,
            None
            if last is None
            else (instant_of(last.due_ms), instant_of(last.came_ms), last.fate),
        )

    def exported(self) -> dict[str, Any]:
        """Return it as the arguments of :meth:`.Schedules.put`, in values that kombu's JSON takes.

        Only arguments that the task's serializer writes may have other values.
        """
        when, start_ms, end_ms = self.recurrence, self.recurrence.start_ms, self.recurrence.end_ms
        return {
            "name": self.name,
            "task": self.task,
            "args": list(self.args),
            "kwargs": self.kwargs,
            "options": self.options,
            "when": list(when.rules),
            "timezone": when.zone,
            "start": instant_of(start_ms).isoformat() if start_ms else None,
            "end": None if end_ms is None else instant_of(end_ms).isoformat(),
            "exclude": list(when.excluded),
            "jitter": self.jitter,
            "overlap": self.overlap,
            "catch_up": self.catch_up,
            "paused": self.is_paused,
        }


@dataclass(frozen=True)
class Schedules:
    """The schedules of an application; they need a registry.

    All methods raise :class:`.RegistryRequired` without ``rabbitdelay_registry_url``, and
    :class:`.RegistryUnavailable` if Redis does not answer.

    Attributes:
        app: The application.
    """

    app: Any

    def put(
        self,
        name: str,
        task: Any,
        when: Any,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timezone: str | None = None,
        start: datetime | None = None,
        end: datetime | None = None,
        exclude: Any = (),
        jitter: Delay = 0,
        overlap: Overlap | None = None,
        catch_up: CatchUp | Delay = "last",
        paused: bool | None = None,
        **options: Any,
    ) -> Schedule | None:
        """Create a schedule, or change it. To put it again as it is changes nothing.

        Args:
            name: Its name, which is unique under the prefix of the registry.
            task: The task, or its name.
            when: When it is due: a timedelta of at least a second; Celery's ``schedule``,
                ``crontab`` or ``solar`` (all workers need the package ephem); a cron text of five
                or six fields, or such as ``@daily``; or a list.
            args: The task's positional arguments, which its serializer can write.
            kwargs: Its keyword arguments, likewise.
            timezone: The time zone of cron texts: an IANA name, or an offset such as UTC+05:30; by
                default the application's, which ``timezone`` and ``enable_utc`` say.
            start: Nothing is due before that, an aware datetime; intervals count from it.
            end: Nothing is due after that.
            exclude: When it is not due all the same: dates (or their texts) in the time zone; cron
                texts or Celery's ``crontab``, as the minutes in which they are due; or a list.
            jitter: By how much an occurrence is late on purpose, at most, in seconds or as a
                timedelta; each by its own part of it, so that not all come at once.
            overlap: What becomes of an occurrence while another run of the schedule still goes:
                ``"skip"`` leaves it out, ``"queue-one"`` lets one wait for the end and leaves out
                others, ``"allow"`` lets it run beside. By default ``"skip"`` for a timedelta whose
                ``catch_up`` is ``"last"``, and ``"allow"`` for all else. A run whose worker was
                killed is over after a minute.
            catch_up: Which occurrences run that were missed: the ``"last"`` one, if the next is not
                due yet; ``"all"``, one after the other; or those that are late by no more than so
                many seconds, or a timedelta.
            paused: Whether it is paused; None for as it is.
            **options: Further options of the task: see :data:`OPTIONS`.

        Returns:
            The schedule; None if its end is over.

        Raises:
            InvalidSchedule: One of these is wrong, or nothing is ever due.
            PublishError: RabbitMQ did not confirm the first occurrence. The schedule was put only
                if this may have arrived.
        """
        if unknown := options.keys() - OPTIONS:
            known = ", ".join(sorted(OPTIONS))
            raise InvalidSchedule(name, f"takes the options {known}, not {sorted(unknown)}")
        if self.app.conf.task_protocol != 2:
            raise InvalidSchedule(name, "needs Celery's task_protocol = 2")
        recurrence = Recurrence.of(when, timezone or _zone_of(self.app), start, end, exclude)
        catch_up_ms = _catch_up_ms(catch_up)
        if overlap is None:
            is_last = isinstance(when, timedelta) and catch_up_ms == UNTIL_NEXT
            overlap = "skip" if is_last else "allow"
        jitter_ms = milliseconds(jitter)
        if not 0 <= jitter_ms <= MAX_JITTER_MS or overlap not in get_args(Overlap):
            takes = " or ".join(get_args(Overlap))
            raise InvalidSchedule(
                (jitter, overlap), f"takes a jitter of at most a day, and the overlap {takes}"
            )
        task_name = task if isinstance(task, str) else str(task.name)
        for each in options.keys() & {"queue", "exchange"}:
            options[each] = getattr(options[each], "name", options[each])
        known = self.app.tasks.get(task_name)
        serializer = options.get("serializer") or getattr(known, "serializer", None)
        serializer = serializer or self.app.conf.task_serializer
        definition = definition_of(task_name, args or (), kwargs or {}, options, serializer)
        in_any_order = json.dumps(json.loads(definition), sort_keys=True)
        said = json.dumps([in_any_order, recurrence, catch_up_ms, jitter_ms, overlap])
        revision = hashlib.sha256(said.encode()).hexdigest()[:12]
        first_ms = recurrence.after(wall_clock.ms())
        occurrence = Occurrence(
            name, first_ms or 0, recurrence, catch_up_ms, revision, jitter_ms, overlap
        )
        if not isinstance(name, str) or not 1 <= _size(name) <= MAX_NAME:
            raise InvalidSchedule(name, f"its name takes 1 to {MAX_NAME} bytes")
        if len(occurrence.text) > MAX_TEXT:
            raise InvalidSchedule(when, "is too long")
        if Occurrence.of(occurrence.text) is None:
            raise InvalidSchedule((start, end, catch_up), "takes times from 1970 on")
        if catch_up_ms != ALWAYS and jitter_ms > (gap_ms := _shortest_gap(recurrence, first_ms)):
            raise InvalidSchedule(
                jitter, f"takes a jitter of at most {gap_ms / 1000:g} s: its gaps"
            )
        if first_ms is None:
            self.delete(name)
            return None
        registry = self._registry
        with registry.alone_under(key_of(name)):
            (before,) = registry.schedules.get([name])
            is_paused = bool(before is not None and before.is_paused if paused is None else paused)
            self._change(NotedSchedule(definition, occurrence, is_paused), before)
        return self.get(name)

    def put_exported(self, exported: Mapping[str, Any], **changes: Any) -> Schedule | None:
        """Put a schedule as :meth:`.Schedule.exported` has returned it, with changes."""
        given = {**exported, **changes}
        for name in ("start", "end"):
            if given.get(name) is not None:
                given[name] = datetime.fromisoformat(given[name])
        options = given.pop("options", None) or {}
        return self.put(**given, **options)

    def _change(self, noted: NotedSchedule, before: NotedSchedule | None) -> None:
        """Store a schedule if it changed."""
        known, name, is_paused = self._registry.schedules, noted.occurrence.name, noted.is_paused
        # The revision stands for all of it.
        revision = noted.occurrence.revision
        if before is None or before.occurrence.revision != revision or not before.is_sent:
            self._put(noted, before)
        elif not before.definition:  # Redis has lost it, and its occurrences have gone on
            known.put(before._replace(definition=noted.definition, is_paused=is_paused))
        elif before.is_paused != is_paused:
            known.pause(name, is_paused=is_paused)

    def _put(self, noted: NotedSchedule, before: NotedSchedule | None) -> None:
        """Note a schedule and send its first occurrence; if that is not sent, take it back."""
        known, short = self._registry.schedules, None
        try:
            known.put(noted._replace(is_sent=False))
        except RegistryUnavailable as error:
            if not error.may_have_arrived:
                raise
            short = error  # it has too few copies, and is put
        try:
            self._send(noted)
            known.sent(noted.occurrence.name)
        except Exception as error:
            if not getattr(error, "may_have_arrived", False):
                if before is None:
                    known.delete(noted.occurrence.name)
                else:
                    known.put(before)
            raise
        if short is not None:
            raise short

    def get(self, name: str) -> Schedule | None:
        """Return a schedule; None if no schedule has that name."""
        (noted,) = self._registry.schedules.get([name])
        return None if noted is None else Schedule.of(noted, self._read(noted))

    def all(self) -> list[Schedule]:
        """Return all schedules, by name."""
        noted = self._registry.schedules.get(self._registry.schedules.all())
        return [Schedule.of(each, self._read(each)) for each in noted if each is not None]

    def next(self, name: str, number: int = 5) -> list[datetime]:
        """Return when a schedule is due next; empty if no schedule has that name."""
        (noted,) = self._registry.schedules.get([name])
        instants: list[datetime] = []
        instant_ms = None if noted is None else noted.occurrence.instant_ms
        while noted is not None and instant_ms is not None and len(instants) < number:
            instants.append(instant_of(instant_ms))
            instant_ms = noted.occurrence.recurrence.after(instant_ms)
        return instants

    def pause(self, name: str) -> bool:
        """Let the occurrences of a schedule come and not run; return whether there is one."""
        return self._pause(name, is_paused=True)

    def resume(self, name: str) -> bool:
        """Let the occurrences of a schedule run again; return whether there is one."""
        return self._pause(name, is_paused=False)

    def _pause(self, name: str, *, is_paused: bool) -> bool:
        (noted,) = self._registry.schedules.get([name])
        if noted is not None:
            self._registry.schedules.pause(name, is_paused=is_paused)
        return noted is not None

    def trigger(self, name: str) -> AsyncResult[Any] | None:
        """Send the task of a schedule now, beside its occurrences; None if there is no such one."""
        (noted,) = self._registry.schedules.get([name])
        sent = noted and self._read(noted)
        return self._sent(sent) if sent else None

    def backfill(self, name: str, since: datetime, until: datetime) -> int:
        """Send the task of a schedule now for each instant of a time that is over.

        An occurrence that has run does not run again, as long as the registry remembers it
        (``rabbitdelay_registry_keep``). They run beside each other, and beside other runs.

        Args:
            name: The name of the schedule.
            since: The begin of the time, an aware datetime.
            until: Its end; later than now is now.

        Returns:
            How many were sent.

        Raises:
            InvalidSchedule: There is no such schedule, or more than :data:`MAX_BACKFILL` instants.
        """
        (noted,) = self._registry.schedules.get([name])
        sent = noted and self._read(noted)
        if noted is None or sent is None:
            raise InvalidSchedule(name, "is no schedule")
        occurrence, end_ms = noted.occurrence, min(milliseconds_of(until), wall_clock.ms())
        missed: list[Occurrence] = []
        instant_ms = occurrence.recurrence.after(milliseconds_of(since) - 1)
        while instant_ms is not None and instant_ms <= end_ms:
            missed.append(occurrence._replace(instant_ms=instant_ms))
            if len(missed) > MAX_BACKFILL:
                raise InvalidSchedule(name, f"has more than {MAX_BACKFILL} instants in that time")
            instant_ms = occurrence.recurrence.after(instant_ms)
        with self.app.rabbitdelay.pipeline():
            for each in missed:
                self._sent(sent, task_id=each.task_id, once=True, delay=AT_ONCE)
        return len(missed)

    def delete(self, name: str) -> bool:
        """End a schedule: nothing that waits of it runs. Return whether there was one."""
        registry = self._registry
        with registry.alone_under(key_of(name)):
            (noted,) = registry.schedules.get([name])
            try:
                registry.close_key(key_of(name), wall_clock.ms() + NOTE_MS)
            finally:  # also if that has too few copies
                registry.schedules.delete(name)
        return noted is not None

    def heal(self) -> list[str]:
        """Send occurrences again that have not come in time; return the names of their schedules.

        Workers call this now and then. If an occurrence has only been late, it runs once.
        """
        names = self._registry.schedules.overdue(wall_clock.ms() - HEAL_AFTER_MS)
        healed = [name for name in names if self._heal(name)]
        if healed:
            logger.warning("Occurrences of schedules are sent again: %s", ", ".join(healed))
        return healed

    def _heal(self, name: str) -> bool:
        registry, key = self._registry, key_of(name)
        with registry.alone_under(key):
            (noted,) = registry.schedules.get([name])
            if noted is None or not _is_broken(noted, wall_clock.ms()):
                return False
            _, newest = registry.newest_under(key)
            if newest == CLOSED:  # a worker noted an occurrence while the schedule was deleted
                registry.schedules.delete(name)
                return False
            following = noted.occurrence.with_id(newest)
            if following is not None and following.instant_ms > noted.occurrence.instant_ms:
                # Its occurrence has come, and Redis was away when the next one was to be noted.
                registry.schedules.follow([following])
                return False
            sent = self._read(noted)
            if sent is None:
                logger.warning("The schedule %r has to be put again: Redis has lost it.", name)
                return False
            registry.schedules.heal(name, wall_clock.ms())
            self._send(noted)
            self.app.rabbitdelay.recorder.record({OCCURRENCES: 1}, sent.task, "sent again")
            return True

    @property
    def _registry(self) -> Registry:
        registry: Registry = self.app.rabbitdelay.registry
        return registry

    def _read(self, noted: NotedSchedule) -> Definition | None:
        return Definition.of(noted.definition, self.app.conf.accept_content)

    def _send(self, noted: NotedSchedule) -> None:
        occurrence, sent = noted.occurrence, self._read(noted)
        if sent is None:
            takes = "takes arguments that accept_content lets be read"
            raise InvalidSchedule(occurrence.name, takes)
        self._sent(
            sent,
            eta=instant_of(occurrence.due_ms),
            task_id=occurrence.task_id,
            key=occurrence.key,
            once=True,
            rabbitdelay_schedule=occurrence.text,
        )

    def _sent(self, sent: Definition, **more: Any) -> AsyncResult[Any]:
        """Send the task of a schedule, as beat does: with the options of the task, if it is known.

        Except when it expires, which would be an instant, and the same for all occurrences.
        """
        known = self.app.tasks.get(sent.task)
        send = partial(self.app.send_task, sent.task) if known is None else known.apply_async
        result: AsyncResult[Any] = send(
            sent.args, sent.kwargs, **sent.options, **more, expires=None
        )
        return result


def _zone_of(app: Any) -> str:
    """Return the name of an application's time zone."""
    if isinstance(app.timezone, LocalTimezone):  # the machine's, which has no name for Celery 5.5
        path = os.path.realpath("/etc/localtime")
        return os.environ.get("TZ", "").lstrip(":") or path.partition("zoneinfo/")[2] or "UTC"
    return str(app.timezone)


def _catch_up_ms(catch_up: Any) -> int:
    """Return what :attr:`.Occurrence.catch_up_ms` is."""
    if isinstance(catch_up, str) and catch_up in _CATCH_UPS.values():
        return UNTIL_NEXT if catch_up == "last" else ALWAYS
    return milliseconds(catch_up)


#: The word for :attr:`.Occurrence.catch_up_ms`, if there is one.
_CATCH_UPS: Final[Mapping[int, CatchUp]] = {UNTIL_NEXT: "last", ALWAYS: "all"}


def _size(name: str) -> int:
    """Return the bytes of a name; 0 if it is no Unicode text."""
    try:
        return len(name.encode())
    except UnicodeEncodeError:
        return 0


def _shortest_gap(recurrence: Recurrence, instant_ms: int | None) -> int:
    """Return the milliseconds between two instants, of the next ones, that are the fewest."""
    gap_ms = MAX_JITTER_MS
    for _ in range(INSTANTS):
        following_ms = None if instant_ms is None else recurrence.after(instant_ms)
        if following_ms is None or instant_ms is None:
            break
        gap_ms, instant_ms = min(gap_ms, following_ms - instant_ms), following_ms
    return gap_ms


def _is_broken(noted: NotedSchedule, now_ms: int) -> bool:
    due_ms, healed_ms = noted.occurrence.due_ms, noted.healed_ms
    return now_ms - max(due_ms, healed_ms) > max(HEAL_AFTER_MS, healed_ms - due_ms)
