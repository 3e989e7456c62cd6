"""The part of ``app.rabbitdelay`` that holds due tasks: jobs and pauses."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Final

from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.app.pipelines import borrowed_publisher
from celery_rabbitdelay.exceptions import PublishError, RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import Delay, Due, milliseconds, milliseconds_of
from celery_rabbitdelay.levels.headers import COMMITTED, JOB, JOB_ID, DelayHeaders
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import DISTRIBUTE
from celery_rabbitdelay.publishing.message import WaitingMessage
from celery_rabbitdelay.publishing.producer import Delayed, DelayedProducer
from celery_rabbitdelay.publishing.publish_loop import PublishPolicy
from celery_rabbitdelay.publishing.signature import signed
from celery_rabbitdelay.registry.application import registry_of
from celery_rabbitdelay.registry.jobs import JobState
from celery_rabbitdelay.registry.pauses import Paused
from celery_rabbitdelay.registry.registry import Registry

logger = logging.getLogger(__name__)

#: How long before the end of its job the copy of a commit is due: this fraction of the remaining
#: time, but at most this number of milliseconds.
NOTE_SHARE: Final = 0.25
NOTE_MS: Final = 60_000


class Holding:
    """The methods of ``app.rabbitdelay`` that hold due tasks.

    All methods raise :class:`.RegistryRequired` if ``rabbitdelay_registry_url`` is not set, and
    :class:`.RegistryUnavailable` if Redis does not answer.

    Args:
        delays: The application's delay levels.
    """

    def __init__(self, delays: Delays) -> None:
        self._delays = delays

    @property
    def registry(self) -> Registry:
        """The registry of this process; it connects at its first use.

        Raises:
            RegistryRequired: ``rabbitdelay_registry_url`` is not set.
            InvalidSetting: The URL is invalid, or the package ``redis`` is missing.
        """
        return registry_of(self._delays)

    def open_job(self, job: str, *, expires: Delay) -> None:
        """Open a job: tasks sent with ``job=`` wait until the job is committed.

        Args:
            job: The job's name, which no recent job may have.
            expires: Seconds, or a timedelta, after which the job is aborted unless committed.

        Raises:
            JobClosed: A job with this name exists.
            InvalidDelay: ``expires`` is invalid.
        """
        self.registry.jobs.open(job, milliseconds(expires))

    def commit_job(self, job: str) -> None:
        """Commit a job: its tasks run when they are due. Repeating the call changes nothing.

        A copy of the commit waits in the levels until shortly before the job expires. If Redis has
        lost the commit by then, distribution restores it.

        Raises:
            JobClosed: The job was aborted, has expired, or does not exist.
        """
        job_id, expires_ms = self.registry.jobs.end(job, JobState.COMMITTED)
        left_ms = expires_ms - wall_clock.ms()
        if left_ms <= 0 or DISTRIBUTE not in self._delays.settings.modules:
            return
        due = Due.after((left_ms - min(left_ms * NOTE_SHARE, NOTE_MS)) / 1000)
        words: dict[str, str | bool] = {COMMITTED: True, JOB: job, JOB_ID: job_id}
        note = WaitingMessage(b"", {"message_id": job_id}, DelayHeaders(due.at_ms, registry=words))
        try:
            publish_signed(self._delays, Delayed(note, DISTRIBUTION, job_id, None), due)
        except PublishError as error:
            logger.warning(
                "Cannot keep a copy of the commit of job %r in RabbitMQ. If Redis loses the commit "
                "before the job expires, the job's tasks do not run: %s",
                job,
                error,
            )

    def abort_job(self, job: str) -> None:
        """Abort a job: its tasks do not run. Repeating the call changes nothing.

        Raises:
            JobClosed: The job was committed, or does not exist.
        """
        self.registry.jobs.end(job, JobState.ABORTED)

    @contextmanager
    def job(self, job: str, *, expires: Delay) -> Iterator[None]:
        """Open a job; commit it at the end of the block, or abort it if the block raises.

        Args:
            job: As for :meth:`open_job`.
            expires: As for :meth:`open_job`.
        """
        self.open_job(job, expires=expires)
        try:
            yield
        except BaseException:
            try:
                self.abort_job(job)
            except RegistryUnavailable as error:  # harmless: a job that is never committed expires
                logger.warning("Cannot abort job %r; the job will expire instead: %s", job, error)
            raise
        self.commit_job(job)

    def pause(
        self,
        *,
        task: str | None = None,
        queue: str | None = None,
        until: datetime | None = None,
    ) -> datetime:
        """Pause the delayed tasks with a name, or for a queue, until they are resumed.

        Within a second, workers stop running these tasks, and move them on arrival to the queue of
        paused tasks. The tasks keep their due times. Tasks that have already arrived, and tasks
        without a delay, still run.

        Args:
            task: The name of the tasks.
            queue: The name of a queue, instead of ``task``.
            until: The end of the pause; None if only :meth:`resume` ends it. The new end replaces
                an earlier end.

        Returns:
            The start of the pause, which is in the past if the tasks were already paused.

        Raises:
            InvalidDelay: ``until`` is a naive datetime.
            TypeError: Not exactly one of ``task`` and ``queue`` is given, or it is not a string.
        """
        until_ms = None if until is None else milliseconds_of(until)
        return self.registry.pauses.pause(*_one(task, queue), until_ms)

    def resume(self, *, task: str | None = None, queue: str | None = None) -> bool:
        """End a pause: workers return the paused tasks to their queues at once.

        Args:
            task: As for :meth:`pause`.
            queue: As for :meth:`pause`.

        Returns: Whether the tasks were paused.

        Raises:
            TypeError: As for :meth:`pause`.
        """
        return self.registry.pauses.resume(*_one(task, queue))

    def paused(self) -> list[Paused]:
        """Return all pauses, oldest first.

        A pause has ``task`` or ``queue``, ``since``, and ``until`` (None for no end).
        """
        return self.registry.pauses.all()


def publish_signed(delays: Delays, delayed: Delayed, due: Due) -> None:
    """Sign a message, publish it into the levels, and wait for the confirm.

    Args:
        delays: The application's delay levels.
        delayed: The message and its destination.
        due: When the message is due.
    """
    with borrowed_publisher(delays) as publisher:
        producer = DelayedProducer(publisher, **delays.settings.for_producer)
        delayed = delayed._replace(message=signed(delayed.message, producer.signing_keys))
        producer.publish_message(delayed, due, PublishPolicy(producer.timeout))


def _one(task: object, queue: object) -> tuple[str | None, str | None]:
    """Return the name of a task and None, or None and the name of a queue."""
    match task, queue:
        case (str(), None) if task:
            return task, None
        case (None, str()) if queue:
            return None, queue
    takes = "takes the name of a task or of a queue, such as task='shop.remind' or queue='mails'"
    raise TypeError(f"{takes}, not task={task!r} and queue={queue!r}")
