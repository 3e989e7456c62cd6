"""The application of a pytest session, on servers for tests, and its worker."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from uuid import uuid4

from celery import Celery
from celery.contrib.testing.worker import start_worker
from kombu import Queue

from celery_rabbitdelay.app.application import Celery as DelayingCelery
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.testing import worker as worker_module
from celery_rabbitdelay.testing.servers import STOP_TIMEOUT, Process, wait_for
from celery_rabbitdelay.testing.shared_clock import SharedClock
from celery_rabbitdelay.testing.travel import TIMEOUT, DidNotSettle, Travel, forget
from celery_rabbitdelay.testing.worker import SETTINGS, WORKER, confirm_all, taking_part

#: The variables of the environment that Celery prefers to the configuration.
_PREFERRED: Final = (
    "CELERY_BROKER_URL",
    "CELERY_BROKER_READ_URL",
    "CELERY_BROKER_WRITE_URL",
    "CELERY_RESULT_BACKEND",
)

#: Seconds that a worker may take to start.
START_TIMEOUT: Final = 120.0

#: Seconds that tasks left by a test may run before their worker is killed.
LEFT_TIMEOUT: Final = 10.0

#: The options of ``celery worker`` that no test needs, and that make it start slowly.
OPTIONS: Final = ("--without-mingle", "--without-gossip", "--loglevel=INFO")


class Worker(Process):
    """A worker of the application, as a process: the fixture ``rabbitdelay_worker``.

    Args:
        name: The application, as ``module:attribute``.
        folder: The folder that it shares with the test.
        options: Further options of ``celery worker``.
    """

    _log_name = "worker.log"

    def __init__(self, name: str, folder: Path, options: Sequence[str]) -> None:
        super().__init__(folder)
        self._name = name
        self._options = options

    def why_ended(self) -> str | None:
        """Say that it has ended, with the end of its log; None while it runs."""
        if self.running:
            return None
        return f"the worker has ended; the end of its log:\n{self.log[-3000:]}"

    def start(self) -> None:
        """Start it, unless it runs, and wait until it takes tasks.

        Raises:
            RuntimeError: It has ended; the error shows the end of its log.
            TimeoutError: It takes no tasks.
        """
        if not self.running:
            (self.folder / WORKER).unlink(missing_ok=True)
            command = [sys.executable, "-m", worker_module.__name__, str(self.folder), self._name]
            # Two nodes of one name, of two applications on one broker, would disturb each other.
            command += [*OPTIONS, f"--hostname={self.folder.name}@%h", *self._options]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            self._process = self._begin(command, env=environment)
        wait_for(self._takes_tasks, "a worker that takes tasks", START_TIMEOUT)

    def kill(self) -> None:
        """Kill it, and its pool, without warning (SIGKILL)."""
        self._end(signal.SIGKILL)
        (self.folder / WORKER).unlink(missing_ok=True)

    def stop(self) -> None:
        """Stop it as a deployment does (SIGTERM): tasks that run are finished."""
        self._end(signal.SIGTERM, os.kill)  # not its pool, whose tasks are finished
        (self.folder / WORKER).unlink(missing_ok=True)

    def _takes_tasks(self) -> bool:
        if ended := self.why_ended():
            raise RuntimeError(ended)
        return (self.folder / WORKER).exists()


class Session:
    """Puts an application on servers for tests, until it is closed.

    Its levels have a prefix of their own. Its registry and its result backend, if they are in
    Redis, are on the Redis for tests.

    Args:
        app: The application.
        broker_url: The broker, with a virtual host that nobody else uses.
        redis: Returns the Redis, which has a ``url``; called if the application uses one.

    Attributes:
        redis: The Redis; None if the application uses none.

    Raises:
        TypeError: Nothing of the application can be delayed.
    """

    def __init__(self, app: Any, broker_url: str, redis: Callable[[], Any]) -> None:
        if not isinstance(app, DelayingCelery):
            raise TypeError(
                f"{app!r} cannot delay tasks: make it with celery_rabbitdelay.Celery, or call "
                "celery_rabbitdelay.install(app)"
            )
        self.app: Any = app
        self.redis: Any = None
        self._worker: Worker | None = None
        self._threads: ExitStack | None = None
        #: Whether it has used the servers since another application did.
        self._is_at_work = False
        settings: dict[str, Any] = {
            "broker_url": broker_url,
            "broker_read_url": broker_url,
            "broker_write_url": broker_url,
            "rabbitdelay_prefix": f"test-{uuid4().hex[:8]}",
            "rabbitdelay_registry_prefix": None,
        }
        has_registry = bool(app.conf.get("rabbitdelay_registry_url"))
        has_results = str(app.conf.result_backend or "").startswith(("redis", "sentinel"))
        if has_registry or has_results:
            self.redis = redis()
        if has_registry:
            settings["rabbitdelay_registry_url"] = self.redis.url
            settings["rabbitdelay_registry_options"] = {}
        if has_results:
            settings["result_backend"] = self.redis.url
            if self.redis.url.startswith("redis://"):
                settings["redis_backend_use_ssl"] = None
        if broker_url.startswith("amqp://"):
            settings["broker_use_ssl"] = False
        with ExitStack() as exits:
            folder = TemporaryDirectory(prefix="rabbitdelay-", ignore_cleanup_errors=True)
            self.folder = Path(exits.enter_context(folder))
            (self.folder / SETTINGS).write_text(json.dumps(settings))
            self._clock = SharedClock(self.folder)
            for name in _PREFERRED:
                if name in os.environ:
                    exits.callback(os.environ.__setitem__, name, os.environ.pop(name))
            exits.callback(self._give_back, dict(app.conf.changes or {}))
            app.conf.update(settings)
            confirm_all(app)
            # Somebody may have used it already, on other servers.
            app.rabbitdelay.reset()
            exits.callback(self._forget)
            exits.callback(self._stop_worker)
            self._exits = exits.pop_all()

    def _give_back(self, former: dict[str, Any]) -> None:
        """Give the application its former settings back."""
        self.app.conf.changes.clear()
        self.app.conf.changes.update(former)
        self.app.rabbitdelay.reset()

    def _forget(self) -> None:
        if self.app.rabbitdelay.has_registry:
            with suppress(Exception):  # a test may have killed that Redis
                forget(self.app.rabbitdelay)

    def worker(self, options: Sequence[str]) -> Worker:
        """Return the worker, which runs.

        Args:
            options: Options of ``celery worker``, if it is not there yet.
        """
        if self._worker is None:
            self._worker = Worker(name_of(self.app), self.folder, options)
        self._worker.start()
        return self._worker

    def worker_in_thread(self) -> None:
        """Start a worker in a thread of this process, unless it runs."""
        if self._threads is None:
            with ExitStack() as threads:
                threads.callback((self.folder / WORKER).unlink, missing_ok=True)
                threads.enter_context(taking_part(self.app, self.folder))
                threads.enter_context(
                    start_worker(self.app, perform_ping_check=False, shutdown_timeout=STOP_TIMEOUT)
                )
                self._threads = threads.pop_all()
        wait_for((self.folder / WORKER).exists, "a worker that takes tasks", START_TIMEOUT)

    def leave(self) -> None:
        """Let another application use the servers, whose queues may have the same names.

        The worker is stopped, and what waits is removed.
        """
        if not self._is_at_work:
            return
        self._is_at_work = False
        self._stop_worker()
        self._purge(self.app.rabbitdelay.topology.queues)

    def _stop_worker(self) -> None:
        if self._worker is not None:
            self._worker.stop()
        if self._threads is not None:
            threads, self._threads = self._threads, None
            threads.close()

    def travel(self, timeout: float = TIMEOUT) -> Travel:
        """Return a traveller.

        Args:
            timeout: Seconds that what runs on the way may take at one instant.
        """

        def why_ended() -> str | None:
            return None if self._worker is None else self._worker.why_ended()

        return Travel(self.app, self.folder, timeout, why_ended)

    @contextmanager
    def clean(self) -> Iterator[None]:
        """Use the shared clock in a block, after removing what earlier tests have left.

        They leave it in queues, in the registry, and in the worker.
        """
        self._is_at_work = True
        with self._clock.installed():
            self._clock.reset()
            self._remove()
            yield

    def _remove(self) -> None:
        self._purge(self.app.rabbitdelay.topology.queues)
        self._purge(self.app.amqp.queues.values())
        if (self.folder / WORKER).exists():
            try:
                with closing(self.travel(LEFT_TIMEOUT)) as travel:
                    travel.rest()
            except DidNotSettle:
                if self._worker is None:
                    raise
                self._worker.kill()
            self._purge(self.app.amqp.queues.values())
        if self.app.rabbitdelay.has_registry:
            forget(self.app.rabbitdelay)

    def close(self) -> None:
        """Stop the worker, and give the application its former settings back."""
        # A result that nobody holds any more says so to Redis, which is about to be gone.
        gc.collect()
        self._exits.close()

    def _purge(self, queues: Iterable[Queue]) -> None:
        with self.app.connection_for_write() as connection:
            for name, found in queue_counts(connection, queues).items():
                if found is not None and found.messages:
                    connection.default_channel.queue_purge(name)


def name_of(app: Any) -> str:
    """Return the name by which another process imports an application.

    Raises:
        LookupError: No module has it as an attribute.
    """
    for module in list(sys.modules.values()):
        if module is None or module.__name__ == "__main__":
            continue
        for name, value in list(vars(module).items()):
            if value is app and isinstance(app, Celery):
                return f"{module.__name__}:{name}"
    raise LookupError(
        f"no module has {app!r} as an attribute, so no other process can import it: make it one, "
        "or set rabbitdelay_worker = thread in pytest's configuration"
    )
