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
from typing import Final
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

from celery.contrib.testing.worker import start_worker
from kombu import Connection, Queue

from celery_rabbitdelay.app.application import Celery
from celery_rabbitdelay.exceptions import ManagementUnavailable
from celery_rabbitdelay.operations.management import management_api
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.testing import servers
from celery_rabbitdelay.testing import worker as worker_module
from celery_rabbitdelay.testing.servers import STOP_TIMEOUT, Named, Process, Server, wait_for
from celery_rabbitdelay.testing.travel import FORGET, TIMEOUT, DidNotSettle, Travel, on_all_keys

#: In Celery, environment variables with these prefixes take precedence over the configuration.
_PREFERRED: Final = ("CELERY_BROKER_", "CELERY_RESULT_BACKEND")

#: Seconds that leftover tasks of a test may run before the worker is killed.
LEFT_TIMEOUT: Final = 10.0

#: Seconds for an answer of Redis; a travel changes all keys of the registry at once.
REDIS_TIMEOUT: Final = 10.0

#: Options of ``celery worker`` for a fast start.
OPTIONS: Final = ("--without-mingle", "--without-gossip", "--loglevel=INFO")


class Worker(Process):
    """A worker of the application, as a process: the fixture ``rabbitdelay_worker``.

    Args:
        name: The application, as ``module:attribute``.
        folder: The folder that the worker shares with the test.
        options: Other options of ``celery worker``.
    """

    def __init__(self, name: str, folder: Path, options: Sequence[str]) -> None:
        super().__init__(folder)
        self._name = name
        self._options = options

    def why_ended(self) -> str | None:
        """Return an error text with the end of the log if the worker has ended; else None."""
        if self.running:
            return None
        return f"the worker has ended; the end of its log:\n{self.log[-3000:]}"

    def start(self) -> None:
        """Start the worker, unless it runs, and wait until it consumes tasks.

        Raises:
            RuntimeError: The worker has ended; the error has the end of its log.
            TimeoutError: The worker consumes no tasks.
        """
        if not self.running:
            (self.folder / worker_module.WORKER).unlink(missing_ok=True)
            command = [sys.executable, "-m", worker_module.__name__, str(self.folder), self._name]
            # Workers of two applications on one broker need different node names.
            command += [*OPTIONS, f"--hostname={self.folder.name}@%h", *self._options]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            self._process = self._begin(command, env=environment)
        wait_for(self._takes_tasks, "a worker that takes tasks", servers.START_TIMEOUT)

    def kill(self) -> None:
        """Kill the worker and its pool abruptly (SIGKILL)."""
        self._end(signal.SIGKILL)
        (self.folder / worker_module.WORKER).unlink(missing_ok=True)

    def stop(self) -> None:
        """Stop the worker as a deployment does (SIGTERM): it finishes running tasks."""
        self._end(signal.SIGTERM, os.kill)  # not its pool, which finishes its tasks
        (self.folder / worker_module.WORKER).unlink(missing_ok=True)

    def _takes_tasks(self) -> bool:
        if ended := self.why_ended():
            raise RuntimeError(ended)
        return (self.folder / worker_module.WORKER).exists()


class Session:
    """Moves an application to servers for tests, until the session is closed.

    The levels get their own prefix. A registry, and a result backend in Redis, use the Redis for
    tests.

    Args:
        app: The application.
        broker_url: The broker, with an unused virtual host.
        redis: Returns the Redis for tests; called if the application uses Redis.

    Attributes:
        redis: The Redis server for tests; None if the application does not use Redis.

    Raises:
        TypeError: The application cannot delay tasks.
    """

    def __init__(self, app: object, broker_url: str, redis: Callable[[], Server | Named]) -> None:
        if not isinstance(app, Celery):
            raise TypeError(
                f"{app!r} cannot delay tasks: make it with celery_rabbitdelay.Celery, or call "
                "celery_rabbitdelay.install(app)"
            )
        self.app = app
        self.redis: Server | Named | None = None
        self._worker: Worker | None = None
        settings: dict[str, object] = {
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
            url = self.redis.url
            if has_registry:
                settings["rabbitdelay_registry_url"] = url
                settings["rabbitdelay_registry_options"] = {"socket_timeout": REDIS_TIMEOUT}
            if has_results:
                settings["result_backend"] = url
                if url.startswith("redis://"):
                    settings["redis_backend_use_ssl"] = None
        if broker_url.startswith("amqp://"):
            settings["broker_use_ssl"] = False
        with ExitStack() as exits:
            folder = TemporaryDirectory(prefix="rabbitdelay-", ignore_cleanup_errors=True)
            self.folder = Path(exits.enter_context(folder))
            (self.folder / worker_module.SETTINGS).write_text(json.dumps(settings))
            self._clock = worker_module.SharedClock(self.folder)
            for name in [name for name in os.environ if name.startswith(_PREFERRED)]:
                exits.callback(os.environ.__setitem__, name, os.environ.pop(name))
            exits.callback(self._give_back, dict(app.conf.changes or {}))
            worker_module.move(app, settings)
            exits.callback(self._forget)
            self._exits = exits.pop_all()

    def _give_back(self, former: dict[str, object]) -> None:
        """Restore the application's former settings."""
        self.app.conf.clear()
        self.app.conf.update(former)
        self.app.rabbitdelay.reset()

    def _forget(self) -> None:
        """Remove waiting messages, which another application's worker would get when due."""
        with suppress(Exception):  # a test may have killed the servers
            self._purge(self.app.rabbitdelay.topology.queues)
        if self.app.rabbitdelay.has_registry:
            with suppress(Exception):
                on_all_keys(self.app, FORGET)

    def worker(self, options: Sequence[str]) -> Worker:
        """Return the running worker.

        Args:
            options: Options of ``celery worker``, used when the worker is made.
        """
        if self._worker is None:
            self._worker = Worker(name_of(self.app), self.folder, options)
            self._exits.callback(self._worker.stop)
        self._worker.start()
        return self._worker

    def worker_in_thread(self) -> None:
        """Start a worker in a thread of this process, unless it runs."""
        consumed = self.folder / worker_module.WORKER
        if not consumed.exists():
            self._exits.enter_context(worker_module.taking_part(self.app, self.folder))
            self._exits.enter_context(
                start_worker(self.app, perform_ping_check=False, shutdown_timeout=STOP_TIMEOUT)
            )
        wait_for(consumed.exists, "a worker that takes tasks", servers.START_TIMEOUT)

    def travel(self, timeout: float = TIMEOUT) -> Travel:
        """Return an object that travels in time.

        Args:
            timeout: Seconds for all tasks that run at one instant.
        """

        def why_ended() -> str | None:
            return None if self._worker is None else self._worker.why_ended()

        return Travel(self.app, self.folder, timeout, why_ended)

    @contextmanager
    def clean(self) -> Iterator[None]:
        """Remove the leftovers of earlier tests, and use the shared clock in a block.

        Leftovers are in queues, in the registry, and in the worker.
        """
        with self._clock.installed():
            self._clock.reset()
            self._remove()
            yield

    def _remove(self) -> None:
        self._purge([*self.app.rabbitdelay.topology.queues, *self.app.amqp.queues.values()])
        if (self.folder / worker_module.WORKER).exists():
            try:
                with closing(self.travel(LEFT_TIMEOUT)) as travel:
                    travel.rest()
            except DidNotSettle:
                if self._worker is None:
                    raise
                self._worker.kill()
            self._purge(self.app.amqp.queues.values())
        if self.app.rabbitdelay.has_registry:
            on_all_keys(self.app, FORGET)

    def close(self) -> None:
        """Stop the worker, and restore the application's former settings."""
        # A result that is garbage collected unsubscribes in Redis, which is about to end.
        gc.collect()
        self._exits.close()

    def _purge(self, queues: Iterable[Queue]) -> None:
        with self.app.connection_for_write() as connection:
            for name, found in queue_counts(connection, queues).items():
                if found is not None and found.messages:
                    Queue(name)(connection.default_channel).purge()


def name_of(app: object) -> str:
    """Return the name under which another process can import an application.

    Raises:
        LookupError: No module has the application as an attribute.
    """
    for module_name, module in [*sys.modules.items()]:
        if module_name != "__main__":
            for name, value in [*getattr(module, "__dict__", {}).items()]:
                if value is app:
                    return f"{module_name}:{name}"
    raise LookupError(
        f"no other process can import {app!r}: make it an attribute of a module, or set "
        "rabbitdelay_worker = thread in pytest's configuration"
    )


@contextmanager
def own_virtual_host(broker_url: str, management_url: str = "") -> Iterator[str]:
    """Make a virtual host with the management API, and delete it at the end of the block.

    Args:
        broker_url: The URL of the broker; its user gets all permissions in the virtual host.
        management_url: The URL of the management API, with an administrator as its user; empty for
            the default port on the broker's host, with the broker's user.

    Yields:
        The URL of the virtual host.

    Raises:
        InvalidManagementURL: ``management_url`` is invalid.
        ServerNotStarted: The management API does not answer, or refuses.
    """
    broker, name = Connection(broker_url), f"test-{uuid4().hex[:8]}"
    api = management_api(broker, management_url or None)
    everything = dict.fromkeys(("configure", "write", "read"), ".*")
    try:
        api.change("PUT", "vhosts", name)
        api.change("PUT", "permissions", name, broker.userid or "guest", **everything)
    except ManagementUnavailable as error:
        raise servers.ServerNotStarted(
            "cannot make a virtual host for the tests; name another management API with "
            f"--rabbitdelay-management: {error}"
        ) from error
    try:
        yield urlunsplit(urlsplit(broker_url)._replace(path=f"/{name}"))
    finally:
        api.change("DELETE", "vhosts", name)
