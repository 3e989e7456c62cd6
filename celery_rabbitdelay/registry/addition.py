"""Implements the kernel's extension hooks for the registry."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app.celery_internals import is_sent_by_celery
from celery_rabbitdelay.app.options import Options
from celery_rabbitdelay.app.seams import AddedToSend, Addition, Send
from celery_rabbitdelay.levels import headers as names
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.levels.headers import DelayHeaders
from celery_rabbitdelay.publishing.message import WaitingMessage
from celery_rabbitdelay.publishing.producer import Delayed
from celery_rabbitdelay.registry.application import (
    EXPIRED,
    OPTIONS,
    RegistryOptions,
    RegistrySettings,
    register_sent,
    registry_of,
)
from celery_rabbitdelay.registry.decision import (
    Arrival,
    Registration,
    Ticket,
    Verdict,
    attempt_of,
    new_copy,
)
from celery_rabbitdelay.registry.index import Filter
from celery_rabbitdelay.registry.jobs import JobState
from celery_rabbitdelay.registry.record import stored
from celery_rabbitdelay.registry.rows import RowRegistration
from celery_rabbitdelay.registry.waiting import Waiting

logger = logging.getLogger(__name__)

NS_PER_US: Final = 1000

#: Seconds until the next attempt to record a commit again, if Redis was down.
CONFIRM_AGAIN: Final = 5.0


class RegistryAddition(Addition):
    """Plugs the registry into the kernel's seams.

    Args:
        delays: The application's delay levels.
    """

    is_asked_by_distribution = True

    @property
    def _settings(self) -> RegistrySettings:
        return self.delays.settings_of(RegistrySettings)

    def check(self, options: Options) -> None:
        """Refuse invalid options of the registry; without a registry, refuse all of them."""
        given = {name: options[name] for name in OPTIONS if options.get(name) is not None}
        for name, value in given.items():
            is_taken, takes = OPTIONS[name]
            if not is_taken(value):
                raise exceptions.UnknownOption(name, value, takes.format(name=name))
        for name, value in given.items():
            if value is not False and self._settings.registry_url is None:
                raise exceptions.RegistryRequired(f"{name} = {value!r}")

    def to_send(self, send: Send) -> AddedToSend | None:
        """Return the registry's part of a send; None for a send without options of the registry."""
        wanted = RegistryOptions.of(self._settings, send.task, send.added, send.former)
        return RegisteredSend(send, wanted) if any(wanted) else None

    def to_rows(
        self,
        name: str,
        task: object,
        options: Options,
        fail: Callable[[Sequence[int], Exception], None],
    ) -> RowRegistration:
        """Return the registry's part of a ``send_many``; every row may have a key."""
        wanted = RegistryOptions.of(self._settings, task, options, {})
        return RowRegistration(self.delays, wanted, name, fail)

    def affects(self, task: object) -> bool:
        """Return whether all sends of a task concern the registry."""
        return any(RegistryOptions.of(self._settings, task, {}, {}))

    def envelope_arrived(
        self, inner: Sequence[DelayHeaders], due_ms: int
    ) -> int | Sequence[bool] | None:
        """Hold an envelope if all its tasks belong to open jobs; drop tasks of aborted jobs.

        The workers make all other decisions.
        """
        registry = registry_of(self.delays)
        arrivals = [Arrival.of(headers, due_ms, "", redelivered=True) for headers in inner]
        try:
            decisions = registry.breaker.call(partial(registry.decide, arrivals, notes=False))
            found = zip(arrivals, decisions, strict=True)
            dropped = [each for each, one in found if one.verdict is Verdict.EXPIRED]
            if dropped:  # no worker will record these verdicts
                registry.breaker.call(partial(registry.decide, dropped, notes=True))
        except exceptions.RegistryUnavailable:
            return None
        waits = [decision for decision in decisions if decision.verdict is Verdict.LATER]
        goes_on = any(one.verdict is Verdict.RUN or one.is_new_due for one in decisions)
        if waits and not goes_on:
            return min(decision.until_ms for decision in waits)
        goes = [decision.verdict is not Verdict.EXPIRED for decision in decisions]
        self._count_expired([one for one, is_sent in zip(inner, goes, strict=True) if not is_sent])
        return goes

    def _count_expired(self, dropped: Sequence[DelayHeaders]) -> None:
        """Count and log the tasks that were dropped from an envelope."""
        if not dropped:
            return
        logger.info("Dropped %d tasks from an envelope: their job was aborted.", len(dropped))
        # A message may name any task, so count only known tasks by name.
        counts = Counter(
            (
                name if (name := str(one.others.get("task"))) in self.delays.app.tasks else "",
                str(one.routing_key) if one.exchange == "" else "",
            )
            for one in dropped
        )
        for labels, count in counts.items():
            self.delays.recorder.record({EXPIRED: count}, *labels)

    def note_arrived(self, note: WaitingMessage) -> Due | None:
        """Record a job's commit again, in case Redis lost it; retry later if Redis is down."""
        words = note.headers.registry
        job, job_id = words.get(names.JOB), words.get(names.JOB_ID)
        if (
            names.COMMITTED not in words
            or job is None
            or note.properties.get("message_id") != job_id
        ):
            raise exceptions.UnprocessableMessage("it records a commit, but names no valid job")
        try:
            registry_of(self.delays).jobs.confirm(str(job), str(job_id))
        except exceptions.RegistryUnavailable:
            return Due.after(CONFIRM_AGAIN)
        return None

    def revoked(self, task_ids: Sequence[str]) -> None:
        """Cancel revoked tasks, so that the revoke lasts until they are due."""
        registry_of(self.delays).cancel(task_ids)

    def purged(self) -> int:
        """Cancel all waiting tracked tasks; return their number."""
        return self.delays.part(Waiting).cancel_pending()

    def is_waiting(self, task_id: str) -> bool:
        """Return whether a task is tracked and waits."""
        return self.delays.part(Waiting).is_waiting(task_id)

    def status(self) -> Mapping[str, object]:
        """Return the due time of the next tracked task, all pauses, and the open jobs' names."""
        registry = registry_of(self.delays)
        try:
            # Skip overdue tasks: their messages are lost, or about to arrive.
            first = next(registry.index.pending(Filter(due_after_ms=wall_clock.ms())), None)
            paused = [pause._asdict() for pause in registry.pauses.all()]
            jobs = sorted(registry.jobs.open_ones(registry.now_ms()))
        except (exceptions.RegistryUnavailable, OSError) as error:
            return {"error": str(error)}
        return {"next_due": first and first.due, "paused": paused, "open_jobs": jobs}

    def why_not_ready(self) -> str:
        """Return the error of a command to Redis; empty if Redis answers."""
        registry = registry_of(self.delays)
        try:
            registry.store.commands(lambda pipe: pipe.exists(registry.names.only("complete-since")))
        except exceptions.RegistryUnavailable as error:
            return " ".join(str(error).split())
        return ""


class RegisteredSend(AddedToSend):
    """The registry's part of one send.

    Args:
        send: The send.
        wanted: The registry's options of the send.
    """

    def __init__(self, send: Send, wanted: RegistryOptions) -> None:
        self._send = send
        self._wanted = wanted
        self._registry = registry_of(send.delays)

    @property
    def is_alone(self) -> bool:
        """Whether the send queries Redis before its message, or after its confirm."""
        return bool(self._wanted.job) or self._wanted.is_registered

    def headers(self, due: Due) -> Options:
        """Get the message's ticket and the id of its job from the registry.

        A retry or a replacement of a task keeps the task's life, order and job.

        Raises:
            JobClosed: The job is not open. Not raised if Celery itself sends the task, such as a
                retry or the next task of a chain.
            RegistryUnavailable: Redis does not answer. Not raised if Celery itself sends the task.
        """
        wanted, former = self._wanted, self._send.former
        if not self.is_alone:
            return wanted.headers("")
        life, order = Ticket.of(former)
        if former.get(names.KEY, "") != wanted.key:
            order = 0
        job_id = former.get(names.JOB_ID, "") if former.get(names.JOB) == wanted.job else ""
        try:
            if wanted.job and not job_id:
                state, job_id = self._registry.jobs.join(wanted.job, due.at_ms)
                if state is not JobState.OPEN and not is_sent_by_celery():
                    raise exceptions.JobClosed(
                        wanted.job, "unknown" if state is None else state.value
                    )
            if wanted.is_registered and (not former or (wanted.key and not order)):
                known = self._send.options["task_id"] if self._send.has_id and not former else ""
                (ticket,) = self._registry.ask([(known, wanted.key)])
                life, order = life if former else ticket.life, ticket.order
        except exceptions.RegistryUnavailable as error:
            self._sent_although(error)
            life = life if former else names.UNKNOWN_LIFE
            order = order or wall_clock.ns() // NS_PER_US
        # A task with once has a single life.
        ticket = Ticket(0 if wanted.once else life, order if wanted.key else 0)
        return wanted.headers(new_copy() if wanted.is_registered else "", ticket, job_id)

    def _sent_although(self, error: exceptions.RegistryUnavailable) -> None:
        """Log the error if Celery itself sends the task; otherwise raise it."""
        if not self._send.former and not is_sent_by_celery():
            raise error
        task_id = self._send.options["task_id"]
        logger.warning("Cannot query the registry for task %s, sent anyway: %s", task_id, error)

    def confirmed(self, task_id: str, due: Due, delayed: Delayed) -> None:
        """Register the message."""
        if not self._wanted.is_registered:
            return
        name = message = ""
        if self._wanted.track:
            name, message = self._send.name, stored(delayed, tolerance_ms=due.tolerance_ms)
        sent = Registration.of(task_id, delayed.message.headers, name, message)
        options = self._send.options
        # In Celery's message protocol 1, the headers do not contain these counts.
        attempt = attempt_of(options.get("retries"), options.get("replaced_task_nesting"))
        register_sent(self._registry, [sent._replace(attempt=attempt)])
