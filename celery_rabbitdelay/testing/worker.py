"""The clock of a travel, and a worker that follows this clock and reports when it is idle.

The clock is a file of three numbers that a test, its workers and their forks map into memory. The
clock is based on the machine's monotonic clock, which libraries that fake the time do not change.

``python -m celery_rabbitdelay.testing.worker FOLDER MODULE:APP OPTION...`` runs ``celery worker``
with this clock and the settings in the folder. During a travel, the test sends a *look*, a probe
message, through every queue that the worker consumes. A look has the format of a task but does not
run: the worker's consumer acknowledges it at once, and sends answers until the worker has finished
everything that arrived earlier.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Final
from unittest.mock import patch

from celery import signals
from celery.utils.imports import symbol_by_name
from celery.utils.log import get_logger
from celery.worker import state
from celery.worker.request import Request
from kombu import Message

from celery_rabbitdelay.app.application import Celery
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.modules import failures
from celery_rabbitdelay.modules.service import ModuleService
from celery_rabbitdelay.registry import pauses
from celery_rabbitdelay.worker.bootsteps import RestoreTasks
from celery_rabbitdelay.worker.celery_internals import RabbitMQStep

logger = get_logger(__name__)

#: The name of the task in a look.
LOOK: Final = "celery_rabbitdelay.testing.look"

#: The header with the number of a look.
NUMBER: Final = "look"

#: The files in the folder: the settings, the UDP port of the test, and the worker's queues.
SETTINGS, ANSWERS, WORKER = "settings.json", "answers", "worker"

#: Seconds between two answers to a look until the worker is idle.
ANSWER_EVERY: Final = 0.005


#: The indexes of the numbers: the offset to the monotonic clock; the instant at which the clock is
#: stopped, or 0; and whether the user's own code sees this time.
_AHEAD, _STANDS_AT, _SHOWN = range(3)


class Clock:
    """A clock of one process; all values are nanoseconds since 1970-01-01 UTC.

    Args:
        base: The clock that this clock follows while it is not stopped.
    """

    def __init__(self, base: Callable[[], int]) -> None:
        self._base = base
        self._numbers = memoryview(bytearray(24)).cast("q")

    def ns(self) -> int:
        """Return the time."""
        return self._numbers[_STANDS_AT] or self._base() + self._numbers[_AHEAD]

    def stand_at(self, ns: int) -> None:
        """Stop the clock at ``ns``."""
        self._numbers[_STANDS_AT] = ns

    def go_on(self) -> None:
        """Continue from the instant at which the clock was stopped."""
        self._numbers[_AHEAD] = self.ns() - self._base()
        self._numbers[_STANDS_AT] = 0


class SharedClock(Clock):
    """A clock of all processes that take part in a test.

    Args:
        folder: The folder of the clock's file.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(time.monotonic_ns)
        path = folder / "clock"
        is_new = not path.exists()
        with path.open("a+b") as file:
            file.truncate(24)
            self._numbers = memoryview(mmap.mmap(file.fileno(), 24)).cast("q")
        if is_new:
            self.reset()

    def reset(self) -> None:
        """Set the clock to the real time."""
        self._numbers[_AHEAD] = time.time_ns() - time.monotonic_ns()
        self._numbers[_STANDS_AT] = self._numbers[_SHOWN] = 0

    @property
    def is_shown(self) -> bool:
        """Whether the user's own code sees this time."""
        return bool(self._numbers[_SHOWN])

    @is_shown.setter
    def is_shown(self, is_shown: bool) -> None:
        self._numbers[_SHOWN] = is_shown

    def installed(self) -> AbstractContextManager[None]:
        """Return a context in which this process and its forks follow this clock."""
        return going_by(self.ns)


@contextmanager
def going_by(clock_ns: Callable[[], int]) -> Iterator[None]:
    """Let this process and its forks follow a clock in a block.

    Within the seconds for which answers of the registry and of the broker are cached, a travel may
    pass days. So no answer is cached. Tasks expire by this clock too. A travel stops whenever a
    held task asks the registry again. So all held tasks ask rarely, and at the same time.

    Args:
        clock_ns: Returns the nanoseconds since 1970-01-01 UTC.
    """
    with (
        patch.object(wall_clock, "ns", clock_ns),
        patch.object(pauses, "FRESH", 0.0),
        patch.object(pauses, "PER_SECOND", 1e-3),
        patch.object(pauses, "JITTER", 0.0),
        patch.object(failures, "ASK_AGAIN", 0.0),
        patch.object(Request, "maybe_expire", _maybe_expire),
    ):
        yield


def _maybe_expire(request: Request) -> bool:
    """Revoke an expired task, as Celery does; return whether it has expired."""
    if request.expires is None or wall_clock.now() <= request.expires:
        return False
    state.revoked.add(request.id)
    return True


def shown(instant: datetime) -> AbstractContextManager[object]:
    """Return a context in which the time is ``instant`` for all code, and continues from there.

    Raises:
        ModuleNotFoundError: The package ``time-machine`` is not installed.
    """
    import time_machine  # imported here, because nothing else needs it

    return time_machine.travel(instant, tick=True)


class Rest(RabbitMQStep):
    """Counts the messages that a worker has received and not settled, and answers looks.

    Args:
        consumer: The worker's consumer.
        **options: The options of all steps.

    Attributes:
        folder: The folder that the worker shares with the test.
    """

    requires = (RestoreTasks,)
    folder: ClassVar[Path]

    def start(self, consumer: Any) -> None:
        """Count from now on, and write the names of the consumed queues."""
        self._consumer = consumer
        self._taken = 0
        unsettled: list[Message] = []
        self._unsettled = unsettled
        tasks = consumer.task_consumer
        kombus: type[Message] = tasks.channel.Message
        step = self

        class Counted(kombus):  # type: ignore[misc, valid-type]
            """A counted message."""

            def __init__(self, *args: object, **options: object) -> None:
                super().__init__(*args, **options)
                step._taken += NUMBER not in self.headers
                unsettled.append(self)

        tasks.channel.Message = Counted
        consumer.rabbitdelay_rest = self
        path = self.folder / WORKER
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps([queue.name for queue in tasks.queues]))
        written.replace(path)

    def look(self, number: int) -> None:
        """Answer a look repeatedly until the worker is idle."""
        unfinished = self._unfinished()
        if unfinished:
            self._consumer.timer.call_after(ANSWER_EVERY, lambda: self.look(number))
        served = {each.name: each.module.statistics.received for each in self._modules()}
        answer = {"look": number, "taken": self._taken, "served": served, "unfinished": unfinished}
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
            suppress(FileNotFoundError),  # the run is over
        ):
            port = int((self.folder / ANSWERS).read_text())
            sender.sendto(json.dumps(answer).encode(), ("127.0.0.1", port))

    def _unfinished(self) -> list[str]:
        """Describe the unfinished work of the worker."""
        self._unsettled[:] = [each for each in self._unsettled if not each.acknowledged]
        requests = {*state.reserved_requests, *state.active_requests}
        words = [f"the task {name}" for name in sorted({request.name for request in requests})]
        if self._unsettled and not words:
            words.append(f"{len(self._unsettled)} unacknowledged messages")
        for bucket in self._consumer.task_buckets.values():
            if bucket is not None and bucket.contents:
                words.append(f"{len(bucket.contents)} tasks waiting for their rate limit")
        for module in (each.module for each in self._modules()):
            if module.statistics.received > module.statistics.finished:
                words.append(f"messages in {module.name}")
        return words

    def _modules(self) -> list[ModuleService]:
        """Return the services that count their messages."""
        services = self._consumer.controller.rabbitdelay_services
        return [each for each in services if isinstance(each, ModuleService)]


def move(app: Celery, settings: Mapping[str, object]) -> None:
    """Move an application to the servers of a test.

    Sends without a delay are also confirmed: they reach the broker before their task ends.

    Args:
        app: The application.
        settings: The settings that name the servers.
    """
    app.conf.update(settings)
    options = app.conf.broker_transport_options
    app.conf.broker_transport_options = {**options, "confirm_publish": True}
    # app.rabbitdelay may have been used already, on other servers.
    app.rabbitdelay.reset()


@contextmanager
def taking_part(app: Celery, folder: Path) -> Iterator[None]:
    """Let an application's workers in this process, and its forks, take part in travels.

    Args:
        app: The application.
        folder: The folder with the clock's file.
    """
    clock = SharedClock(folder)
    seen = ExitStack()

    def begin(**_: object) -> None:
        if clock.is_shown:
            seen.enter_context(shown(wall_clock.now()))

    def end(**_: object) -> None:
        seen.close()

    def strategy(task: object, app: Celery, consumer: Any, **options: object) -> object:
        def look(message: Message, body: object, ack: Callable[..., object], *more: object) -> None:
            ack(logger, consumer.connection_errors)
            consumer.rabbitdelay_rest.look(message.headers[NUMBER])

        return look

    try:
        Rest.folder = folder
        app.steps["consumer"].add(Rest)
        app.task(name=LOOK, rabbitdelay=False, Strategy=staticmethod(strategy))(_never_runs)
        signals.task_prerun.connect(begin, weak=False)
        signals.task_postrun.connect(end, weak=False)
        yield
    finally:
        signals.task_prerun.disconnect(begin)
        signals.task_postrun.disconnect(end)
        app.tasks.pop(LOOK, None)
        app.steps["consumer"].discard(Rest)


def _never_runs() -> None:
    """Register the name of looks as a task."""


def main() -> None:
    """Run a worker."""
    folder, name, *options = sys.argv[1:]
    app = symbol_by_name(name)
    move(app, json.loads(Path(folder, SETTINGS).read_text()))
    with SharedClock(Path(folder)).installed(), taking_part(app, Path(folder)):
        app.worker_main(["worker", *options])


if __name__ == "__main__":
    main()
