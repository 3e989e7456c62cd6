"""The settings and the connections of one application.

:class:`Delays` is the base class of ``app.rabbitdelay``. :class:`.RabbitDelay` adds the methods
that users call.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import celery
from kombu import Connection, Producer
from kombu.transport import pyamqp

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app.celery_internals import eta_of, forget_connections
from celery_rabbitdelay.app.instruments import Recorder
from celery_rabbitdelay.app.options import refuse_two_times
from celery_rabbitdelay.app.settings import Groups, Settings, SettingsGroup, read_settings
from celery_rabbitdelay.levels.delay import TAKES_INSTANT, Delay, Due
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.levels.warning_limit import HOUR, WarningLimit
from celery_rabbitdelay.publishing.declaration import check_complete, declare
from celery_rabbitdelay.publishing.kombu_internals import cached_property as locked_property
from celery_rabbitdelay.publishing.publisher import Publisher, PublisherPool

logger = logging.getLogger(__name__)

PartT = TypeVar("PartT")
GroupT = TypeVar("GroupT", bound=SettingsGroup)


class DelayingCelery(celery.Celery):
    """An application with ``app.rabbitdelay``, for the modules that :class:`.Celery` imports."""

    if TYPE_CHECKING:

        @property
        def rabbitdelay(self) -> Delays:
            """The application's delay levels."""


class FakeBroker(NamedTuple):
    """Records the messages of an application in tests, instead of a broker.

    Attributes:
        publisher: Records the messages that would wait in the levels.
        producer: Records all other messages.
        broadcast: Records the name and the arguments of a command to the workers.
    """

    publisher: Publisher
    producer: Producer
    broadcast: Callable[[str, Mapping[str, object]], None]


class Delays:
    """The settings and the connections of one application.

    Args:
        app: The application; its configuration is read when it is first needed.

    Attributes:
        recorder: Passes counts and measurements to additions.
        fake_broker: Used instead of the broker in tests; None otherwise.
    """

    def __init__(self, app: DelayingCelery) -> None:
        self.app = app
        self.recorder: Recorder = Recorder()
        self.fake_broker: FakeBroker | None = None
        self._parts: dict[Callable[[Delays], object], Any] = {}
        self._instead: Mapping[Callable[[Delays], object], Callable[[Delays], object]] = {}
        self._countdowns = WarningLimit(logger, "Delays treated as countdowns", HOUR)
        #: The threads of each process, because threads do not survive a fork.
        self._threads: dict[int, ThreadPoolExecutor] = {}

    @cached_property
    def groups(self) -> Groups:
        """All configured settings, read on first use; :meth:`reset` reads them again.

        Raises:
            InvalidSetting: A setting is invalid.
        """
        return read_settings(self.app.conf, getattr(self.app, "namespace", None))

    @cached_property
    def settings(self) -> Settings:
        """The kernel's settings.

        Raises:
            InvalidSetting: A setting of the kernel, or of an addition, is invalid.
        """
        return self.settings_of(Settings)

    def settings_of(self, group: type[GroupT]) -> GroupT:
        """Return the settings of an addition.

        Args:
            group: The class of the settings.

        Raises:
            InvalidSetting: A setting of the kernel, or of an addition, is invalid.
        """
        read = self.groups.get(group) or group()
        assert isinstance(read, group)
        return read

    def setting(self, name: str) -> object:
        """Return the value of any setting; None if it is not configured.

        Args:
            name: The setting's name without ``rabbitdelay_``.
        """
        groups = (each for each in self.groups.values() if hasattr(each, name))
        return getattr(next(groups, None), name, None)

    def part(self, make: Callable[[Delays], PartT]) -> PartT:
        """Return an object of this application and process, made on first use and then cached.

        Args:
            make: The class or function that makes the object, and the object's key in the cache.
                :meth:`close` calls the object's ``close``, if it has one.
        """
        if make not in self._parts:
            self._parts.setdefault(make, self._instead.get(make, make)(self))
        part: PartT = self._parts[make]
        return part

    @property
    def topology(self) -> Topology:
        """The levels: exchanges, queues, bindings, and ``route(delay, queue_name)``."""
        return self.settings.topology

    @locked_property  # all threads share one pool
    def pool(self) -> PublisherPool:
        """Return the process's pool of publishers; its limit is ``broker_pool_limit``."""
        return PublisherPool(self.app.connection_for_write(), self.app.conf.broker_pool_limit)

    @cached_property
    def available(self) -> bool:
        """Whether the application's broker is RabbitMQ, over py-amqp: the levels need both."""
        return self.is_available(self.app.connection_for_write())

    def is_available(self, connection: Connection | None) -> bool:
        """Return whether a broker is RabbitMQ, over py-amqp: delays can wait in its levels.

        Args:
            connection: The caller's own connection; None for the application's.
        """
        if connection is None:
            return self.available
        return isinstance(connection.transport, pyamqp.Transport)

    def check_protocol(self) -> None:
        """Refuse delayed sends in Celery's message protocol 1.

        Raises:
            InvalidSetting: ``task_protocol`` is 1.
        """
        protocol = self.app.conf.task_protocol
        if protocol == 1:
            takes = "delayed tasks need Celery's message protocol 2, its default"
            raise exceptions.InvalidSetting("task_protocol", protocol, takes)

    def declare(self, connection: Connection) -> None:
        """Declare the levels on a broker, as a worker does at its start.

        Declaring restores queues and exchanges that were deleted by hand, and takes about 50 ms.
        With ``rabbitdelay_declare = "never"``, this method only checks that they exist.

        Raises:
            LayoutConflict: Another layout is declared under the prefix.
            TopologyIncomplete: A queue or exchange is missing, and must not be declared.
        """
        if self.settings.declare == "auto":
            declare(connection, self.topology)
        else:
            check_complete(connection, self.topology)

    def due(
        self,
        delay: Delay | None,
        countdown: float | None,
        eta: datetime | str | None,
        tolerance_ms: int = 0,
    ) -> Due:
        """Return the due time: by a delay, else by a countdown that is not 0, else by an eta.

        Raises:
            InvalidDelay: A time is not finite, or an ``eta`` is not ISO 8601.
            InvalidDelayType: A value is neither a length of time nor an instant; or a delay is
                combined with a countdown or an eta.
        """
        if delay is not None:
            if countdown is not None or eta is not None:  # saves a call per row
                refuse_two_times(delay, countdown, eta)
            return Due.after(delay, tolerance_ms)
        if countdown or eta is None:
            return Due.after(countdown or 0, tolerance_ms)
        instant = eta_of(eta, UTC)
        if instant is None:
            error = exceptions.InvalidDelay if isinstance(eta, str) else exceptions.InvalidDelayType
            raise error(eta, TAKES_INSTANT, "eta")
        return Due.at(instant, tolerance_ms)

    def warn_treated_as_countdown(self, why: str) -> None:
        """Log that a delay is treated as a countdown; at most once an hour for each reason.

        Args:
            why: The reason, and what happens to the task.
        """
        if self._countdowns.allows(why):
            logger.warning("rabbitdelay: a delay is treated as Celery's own countdown: %s.", why)

    def close(self) -> None:
        """Close the connections of this process, and end its threads."""
        if threads := self._threads.pop(os.getpid(), None):
            threads.shutdown(wait=False)
        if "pool" in self.__dict__:
            self.pool.close()
        for part in self._parts.values():
            if (close := getattr(part, "close", None)) is not None:
                close()

    def reset(self) -> None:
        """Drop settings and connections, including Celery's; they are read and opened on demand."""
        self.close()
        for name in ("groups", "settings", "pool", "available"):
            self.__dict__.pop(name, None)
        self._parts = {}
        forget_connections(self.app)

    @contextmanager
    def replaced_by(
        self,
        fake_broker: FakeBroker,
        instead: Mapping[Callable[[Delays], object], Callable[[Delays], object]] = {},
    ) -> Iterator[None]:
        """Replace the broker within a block.

        Args:
            fake_broker: Takes all messages.
            instead: Maps functions that make a :meth:`part` to the functions that replace them.
        """
        former = self.fake_broker, self._instead, self._parts
        self.fake_broker, self._instead, self._parts = fake_broker, instead, {}
        try:
            yield
        finally:
            self.fake_broker, self._instead, self._parts = former
