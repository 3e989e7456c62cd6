"""``app.rabbitdelay.schedules``: recurring tasks, without a scheduler process.

A schedule has one record in Redis; see ``record.py``. ``put`` stores the record first and then
sends the first occurrence. If the send fails, workers send the occurrence again once it is late.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import islice, pairwise
from logging import getLogger
from typing import Any, Final, Literal, NamedTuple, get_args
from uuid import uuid4

from celery.result import AsyncResult
from celery.utils.time import LocalTimezone

from celery_rabbitdelay.app.delays import DelayingCelery
from celery_rabbitdelay.exceptions import InvalidSchedule
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import Delay, instant_of, milliseconds
from celery_rabbitdelay.levels.headers import COPY, TRACKED
from celery_rabbitdelay.publishing.producer import Delayed
from celery_rabbitdelay.registry.application import registry_of
from celery_rabbitdelay.registry.decision import new_copy
from celery_rabbitdelay.registry.pauses import paused_since
from celery_rabbitdelay.registry.record import restored, stored
from celery_rabbitdelay.schedules import record
from celery_rabbitdelay.schedules.record import Fate, NotedSchedule, Records
from celery_rabbitdelay.schedules.recurrence import (
    ALL,
    LAST,
    MAX_NAME,
    MAX_TEXT,
    OCCURRENCES,
    Occurrence,
    Overlap,
    Recurrence,
)

logger = getLogger(__name__)

#: The options of a send that a schedule supports. All other options concern a single message.
OPTIONS: Final = frozenset(
    {"queue", "exchange", "routing_key", "priority", "serializer", "headers", "ignore_result"}
    | {"time_limit", "soft_time_limit", "shadow", "argsrepr", "kwargsrepr", "link", "link_error"}
    | {"retry", "retry_policy", "compression", "delivery_mode", "mandatory"}
)

#: The number of instants that are searched for the shortest interval.
INSTANTS: Final = 50

#: The delay of a triggered task, in milliseconds: the registry decides on delayed tasks only.
AT_ONCE_MS: Final = 100

CatchUp = Literal["last", "all"]

#: The words for special values of :attr:`.Occurrence.catch_up_ms`.
_CATCH_UPS: Final[Mapping[int, CatchUp]] = {LAST: "last", ALL: "all"}

_TAKES: Final = (
    f"takes a name of 1 to {MAX_NAME} bytes, times from 1970 on, a jitter of at most a day, an "
    f"overlap of {' or '.join(get_args(Overlap))}, and a catch_up of last, all or seconds"
)


class Schedule(NamedTuple):
    """A schedule.

    Attributes:
        name: The schedule's name.
        task: The name of the task that the schedule sends; empty if Redis has lost the name, until
            the next occurrence arrives.
        args: The task's positional arguments; None if this program cannot read them.
        kwargs: The task's keyword arguments; None if this program cannot read them.
        options: The options of the task.
        next_at: When the next occurrence is due.
        next_id: The task id of the next occurrence; cancel it to skip the occurrence.
        is_paused: Whether the schedule is paused.
        recurrence: When the schedule is due.
        overlap: How to treat an occurrence while another run has not ended.
        catch_up: Which missed occurrences run: "last", "all", or the largest lateness in seconds.
        jitter: The largest jitter of an occurrence, in seconds.
        last: The due time, the arrival and the fate of the last occurrence that arrived; None if
            unknown.
    """

    name: str
    task: str
    args: tuple[object, ...] | None
    kwargs: dict[str, object] | None
    options: dict[str, object]
    next_at: datetime
    next_id: str
    is_paused: bool
    recurrence: Recurrence
    overlap: Overlap
    catch_up: CatchUp | float
    jitter: float
    last: tuple[datetime, datetime, Fate] | None

    @classmethod
    def of(cls, noted: NotedSchedule, accept: Iterable[str]) -> Schedule:
        """Make a schedule from its record.

        Args:
            noted: The record.
            accept: Celery's ``accept_content``, needed to read the arguments.
        """
        occurrence = noted.occurrence
        assert occurrence is not None
        return cls(
            occurrence.name,
            *record.read(noted.message, accept),
            dict(occurrence.options),
            instant_of(occurrence.due_ms),
            occurrence.task_id,
            noted.is_paused,
            occurrence.recurrence,
            occurrence.overlap,
            _CATCH_UPS.get(occurrence.catch_up_ms, occurrence.catch_up_ms / 1000),
            occurrence.jitter_ms / 1000,
            noted.last,
        )

    def exported(self) -> dict[str, Any]:
        """Return the arguments of :meth:`.Schedules.put`, as values that kombu's JSON takes.

        Only the task's own arguments may be of other types, if its serializer is not JSON.
        """
        when, start_ms, end_ms = self.recurrence, self.recurrence.start_ms, self.recurrence.end_ms
        return {
            "name": self.name,
            "task": self.task,
            "args": None if self.args is None else list(self.args),
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


class Schedules:
    """The schedules of an application; they need a registry.

    All methods raise :class:`.RegistryUnavailable` if Redis does not answer.

    Args:
        app: The application.

    Raises:
        RegistryRequired: ``rabbitdelay_registry_url`` is not set.
    """

    def __init__(self, app: DelayingCelery) -> None:
        self.app = app
        self._records = Records(registry_of(app.rabbitdelay))

    def put(
        self,
        name: str,
        task: record.AnyTask,
        when: object,
        args: Iterable[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        timezone: str | None = None,
        start: datetime | str | None = None,
        end: datetime | str | None = None,
        exclude: object = (),
        jitter: Delay = 0,
        overlap: Overlap | None = None,
        catch_up: CatchUp | Delay = "last",
        paused: bool | None = None,
        **options: object,
    ) -> Schedule | None:
        """Create or change a schedule. Putting it again unchanged has no effect.

        Args:
            name: The name, unique under the prefix of the registry.
            task: The task, or its name.
            when: A timedelta of at least a second; Celery's ``schedule`` or ``crontab``; a cron
                expression of five or six fields, or a nickname such as ``@daily``; or a list of
                these.
            args: The task's positional arguments, which its serializer must accept.
            kwargs: The task's keyword arguments, which its serializer must accept.
            timezone: The time zone of cron expressions: an IANA name, or an offset such as
                UTC+05:30. The default is the time zone of the crontab, or else of the application
                (see Celery's ``timezone`` and ``enable_utc``).
            start: The earliest instant: an aware datetime or its ISO 8601 text. Intervals count
                from this instant.
            end: The latest instant, in the same forms.
            exclude: Days in the time zone without occurrences: a date or its text, or a list of
                these.
            jitter: The largest jitter, in seconds or as a timedelta. Each occurrence is late by a
                random-looking but fixed part of the jitter, so that not all schedules come due at
                once.
            overlap: What happens to an occurrence if another run of the schedule has not ended:
                ``"skip"`` skips it, ``"queue-one"`` lets one occurrence wait for the end and skips
                all others, ``"allow"`` runs it at the same time. The default is ``"skip"`` for a
                timedelta whose ``catch_up`` is ``"last"``, otherwise ``"allow"``. A run whose
                worker was killed counts as ended after a minute.
            catch_up: Which missed occurrences run: ``"last"`` runs one occurrence in place of all,
                however late; ``"all"`` runs all of them in turn; a number of seconds or a timedelta
                runs the occurrences that are late by at most this time.
            paused: Whether the schedule is paused; None keeps the present state.
            **options: Other options of the task: see :data:`OPTIONS`.

        Returns:
            The schedule; None if its end has passed.

        Raises:
            InvalidSchedule: An argument is invalid, or no instant is ever due.
            PublishError: RabbitMQ did not confirm the first occurrence. The schedule is stored:
                another call sends the occurrence again, and so do workers once it is a minute late.
        """
        if unknown := options.keys() - OPTIONS:
            known = ", ".join(sorted(OPTIONS))
            raise InvalidSchedule(name, f"takes the options {known}, not {sorted(unknown)}")
        self.app.rabbitdelay.check_protocol()
        # As with beat, a crontab may have its own time zone, such as a crontab of
        # django-celery-beat.
        zone = getattr(when, "__dict__", {}).get("tz", self.app.timezone)
        recurrence = Recurrence.of(when, timezone or _zone_of(zone), start, end, exclude)
        words: dict[str, int] = {word: ms for ms, word in _CATCH_UPS.items()}
        if isinstance(catch_up, str):
            catch_up_ms = words.get(catch_up, ALL - 1)
        else:
            catch_up_ms = milliseconds(catch_up)
        if overlap is None:
            is_last = isinstance(when, timedelta) and catch_up_ms == LAST
            overlap = "skip" if is_last else "allow"
        for option in options.keys() & {"queue", "exchange"}:
            options[option] = getattr(options[option], "name", options[option])
        first_ms, jitter_ms = recurrence.after(wall_clock.ms()), milliseconds(jitter)
        made = Occurrence(name, first_ms or 0, recurrence, catch_up_ms, jitter_ms, overlap, options)
        try:
            text = made.text
        except (TypeError, ValueError) as error:
            takes = f"its options cannot be written as JSON: {error}"
            raise InvalidSchedule(options, takes) from None
        if len(text) > MAX_TEXT - 200:  # the order and other fields are added later
            raise InvalidSchedule(when, "is too long")
        if Occurrence.of(text) is None:
            raise InvalidSchedule((name, start, end, jitter, overlap, catch_up), _TAKES)
        if catch_up_ms != ALL and first_ms is not None:
            instants = islice(recurrence.all_after(first_ms - 1), INSTANTS)
            gaps_ms = [later - former for former, later in pairwise(instants)]
            if gaps_ms and jitter_ms > (gap_ms := min(gaps_ms)):
                gap = f"{gap_ms / 1000:g} s, the shortest gap between two occurrences"
                raise InvalidSchedule(jitter, f"the jitter may be at most {gap}")
        delayed, revision = record.captured(self.app, made, task, args or (), kwargs or {})
        return self._put(made._replace(revision=revision), stored(delayed), paused)

    def put_exported(self, exported: Mapping[str, Any], **changes: Any) -> Schedule | None:
        """Create a schedule from the values of :meth:`.Schedule.exported`, with changes.

        Raises:
            InvalidSchedule: See :meth:`put`; or the exporting program could not read the arguments.
        """
        given = {**exported, **changes}
        if given.get("args", ()) is None:
            takes = "lacks its arguments: export it with an accept_content that allows them"
            raise InvalidSchedule(given["name"], takes)
        options = given.pop("options", None) or {}
        return self.put(**given, **options)

    def _put(self, made: Occurrence, message: str, paused: bool | None) -> Schedule | None:
        """Store a schedule and send its first occurrence, unless nothing has changed."""
        records = self._records
        is_noted = False
        while not is_noted:
            (before,) = records.get([made.name])
            known = before and before.occurrence
            if before and known and known.revision == made.revision and before.message:
                if paused not in (None, before.is_paused):
                    records.note(made.name, paused=int(bool(paused)))
                if before.is_sent:
                    return self.get(made.name)
                made = known
                break
            now_ms = wall_clock.ms()
            first_ms = made.recurrence.after(before.since(now_ms) if before else now_ms)
            if first_ms is None:
                self.delete(made.name)
                return None
            made = made._replace(instant_ms=first_ms, order=self._next_order(before))
            # False if another program has edited the schedule, or an occurrence has arrived.
            is_noted = records.edit(made.name, before, made.order, made, message, paused)
            if is_noted:
                self._unlist(before)
        record.send_all(self.app.rabbitdelay, [record.message_of(made, message)])
        records.note(made.name, unsent="")
        return self.get(made.name)

    def get(self, name: str) -> Schedule | None:
        """Return a schedule; None if no schedule has that name."""
        return next(iter(self._found([name])), None)

    def all(self) -> list[Schedule]:
        """Return all schedules, by name."""
        return self._found(self._records.all())

    def _found(self, names: Sequence[str]) -> list[Schedule]:
        accept = self.app.conf.accept_content
        noted = self._records.get(names)
        return [Schedule.of(one, accept) for one in noted if one and one.occurrence]

    def next(self, name: str, number: int = 5) -> list[datetime]:
        """Return the next instants of a schedule; empty if no schedule has that name."""
        (noted,) = self._records.get([name])
        if noted is None or (occurrence := noted.occurrence) is None:
            return []
        instants = occurrence.recurrence.all_after(occurrence.instant_ms - 1)
        return [instant_of(at_ms) for at_ms in islice(instants, number)]

    def pause(self, name: str) -> bool:
        """Pause a schedule: its occurrences are skipped. Return whether the schedule exists."""
        return self._pause(name, is_paused=True)

    def resume(self, name: str) -> bool:
        """Resume a schedule; return whether the schedule exists."""
        return self._pause(name, is_paused=False)

    def _pause(self, name: str, *, is_paused: bool) -> bool:
        is_known = self.get(name) is not None
        if is_known:
            self._records.note(name, paused=int(is_paused))
        return is_known

    def trigger(self, name: str) -> AsyncResult[Any] | None:
        """Send a schedule's task now, as an additional run; return None for an unknown schedule."""
        (noted,) = self._records.get([name])
        if noted is None or not noted.message:
            return None
        # For the registry, this task is an ordinary task.
        task_id, pattern = str(uuid4()), restored(noted.message, "")
        headers = {COPY: new_copy(), TRACKED: True} if record.is_tracked(pattern) else {}
        sent = record.filled(pattern, task_id, wall_clock.ms() + AT_ONCE_MS, headers)
        record.send_all(self.app.rabbitdelay, [sent])
        result: AsyncResult[Any] = self.app.AsyncResult(task_id)
        return result

    def delete(self, name: str) -> bool:
        """Delete a schedule: its waiting occurrences do not run. Return whether it existed."""
        while True:
            (noted,) = self._records.get([name])
            if noted is None or noted.is_deleted:
                return False
            # Even after the last instant, an occurrence may wait for the end of a run.
            if self._records.edit(name, noted, self._next_order(noted)):
                self._unlist(noted)
                return noted.ahead_ms is not None

    def heal(self) -> list[str]:
        """Send missing occurrences again; return the names of their schedules.

        Workers call this regularly. If an occurrence was only late, it has two messages: the
        message that arrives first counts, and the other message is dropped.
        """
        now_ms, records = wall_clock.ms(), self._records
        names = list(records.overdue(now_ms - record.HEAL_AFTER_MS))
        paused = self._records.registry.pauses.known() if names else {}
        healed: dict[str, Delayed] = {}
        listed: dict[str, int | None] = {}
        for name, noted in zip(names, records.get(names), strict=True):
            if noted is None or noted.ahead_ms is None:
                listed[name] = None
            elif noted.occurrence is None or not noted.message:
                logger.warning("Redis lost schedule %r: create it again with schedules.put.", name)
            elif noted.occurrence.due_ms > now_ms - record.HEAL_AFTER_MS:
                listed[name] = noted.occurrence.due_ms
            elif (when := noted.heals(now_ms)) == "soon":
                records.note(name, missed=now_ms)
            elif when == "now":
                message = record.message_of(noted.occurrence, noted.message)
                task, queue = record.task_of(message), message.queue
                # An occurrence that waits for the end of a pause is not missing.
                if not paused_since(paused, task, queue.name if queue else ""):
                    records.note(name, healed=now_ms)
                    healed[name] = message
                    self.app.rabbitdelay.recorder.record({OCCURRENCES: 1}, task, "sent again")
        records.note_due(listed)
        if healed:
            logger.warning("Resending missing occurrences of schedules: %s", ", ".join(healed))
        record.send_all(self.app.rabbitdelay, list(healed.values()))
        return list(healed)

    def _unlist(self, before: NotedSchedule | None) -> None:
        """Remove a tracked occurrence that will not run from the list of waiting tasks."""
        known = before and before.message and before.occurrence
        if before and known and record.is_tracked(restored(before.message, "")):
            self._records.registry.cancel_each([known.task_id], also_future=False)

    def _next_order(self, before: NotedSchedule | None) -> int:
        (ticket,) = self._records.registry.ask([("", "schedules")])
        return max(ticket.order, before.order + 1 if before else 0)


def _zone_of(zone: object) -> str:
    """Return the name of a time zone."""
    if isinstance(zone, LocalTimezone):  # the machine's time zone, which Celery 5.5 does not name
        path = os.path.realpath("/etc/localtime")
        return os.environ.get("TZ", "").lstrip(":") or path.partition("zoneinfo/")[2] or "UTC"
    return str(zone)
