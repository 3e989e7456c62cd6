"""Pytest fixtures: an application on servers for tests, its worker, and time travel.

Nothing is started, and Celery is not imported, unless a test uses a fixture. The options are for
the command line; in pytest's configuration, their names have underscores:

======================================= ========================================================
``--rabbitdelay-app=shop.tasks:app``    the application
``--rabbitdelay-broker=amqp://...``     an existing RabbitMQ, instead of a private one
``--rabbitdelay-redis=redis://...``     an existing Redis, instead of a private one
``--rabbitdelay-management=http://...`` the management API of RabbitMQ, by default on port 15672
``--rabbitdelay-worker=thread``         the worker in a thread; by default a process
``--rabbitdelay-worker-options=...``    the worker's options; by default ``--concurrency=1``
======================================= ========================================================
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Final

import pytest

from celery_rabbitdelay.testing.servers import Named, RabbitMQServer, RedisServer, Server

if TYPE_CHECKING:
    from celery_rabbitdelay.app.application import Celery
    from celery_rabbitdelay.testing.session import Session, Worker
    from celery_rabbitdelay.testing.travel import Travel

#: A line for ``rabbitmq.conf``: a travel holds messages unacknowledged, and RabbitMQ closes the
#: channel after 30 minutes of real time by default. This line allows a day.
LONG_TRAVELS: Final = "consumer_timeout = 86400000"

_OPTIONS: Final = {
    "app": "the Celery application of the tests, as module:attribute",
    "broker": "the URL of an existing RabbitMQ; by default a private one is started",
    "redis": "the URL of an existing Redis; by default a private one is started",
    "management": "the URL of RabbitMQ's management API; by default on port 15672",
    "worker": "process (the default) or thread: where the worker of the tests runs",
    "worker-options": "options of celery worker; by default --concurrency=1",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options to the command line and to the configuration."""
    group = parser.getgroup("rabbitdelay", "delayed Celery tasks")
    for name, text in _OPTIONS.items():
        group.addoption(f"--rabbitdelay-{name}", help=text)
        parser.addini(f"rabbitdelay_{name.replace('-', '_')}", text, default="")


def _option(config: pytest.Config, name: str) -> str:
    name = f"rabbitdelay_{name}"
    found: str | None = config.getoption(name, None)
    return found or str(config.getini(name))


@pytest.fixture(scope="session")
def rabbitdelay_broker(request: pytest.FixtureRequest) -> Iterator[RabbitMQServer | Named]:
    """Return the RabbitMQ of this run: the server that the option names, or a private server.

    ``url`` is the server's URL. Tests may kill a private RabbitMQ. On another RabbitMQ, the run has
    its own virtual host.
    """
    if url := _option(request.config, "broker"):
        from celery_rabbitdelay.testing.session import own_virtual_host

        with own_virtual_host(url, _option(request.config, "management")) as own_url:
            yield Named(own_url)
    else:
        with RabbitMQServer(settings=[LONG_TRAVELS]) as server:
            yield server
            server.kill()  # its data is not needed, and a regular stop takes seconds


@pytest.fixture(scope="session")
def rabbitdelay_redis(request: pytest.FixtureRequest) -> Iterator[RedisServer | Named]:
    """Return the Redis of this run: the server that the option names, or a private server.

    ``url`` is the server's URL. Tests may kill and suspend a private Redis.
    """
    if url := _option(request.config, "redis"):
        yield Named(url)
    else:
        with RedisServer() as server:
            yield server


@pytest.fixture(scope="session")
def rabbitdelay_celery_app(request: pytest.FixtureRequest) -> object:
    """Return the application that the option ``rabbitdelay_app`` names; tests may override this."""
    from celery.utils.imports import symbol_by_name

    name = _option(request.config, "app")
    if not name:
        raise pytest.UsageError(
            "no application for the tests: set rabbitdelay_app = shop.tasks:app in pytest's "
            "configuration, or override the fixture rabbitdelay_celery_app"
        )
    return symbol_by_name(name)


@pytest.fixture(scope="session")
def _rabbitdelay_sessions() -> list[Session]:
    """Return a list that holds the session of the application that uses the servers now."""
    return []


@pytest.fixture
def _rabbitdelay_session(
    request: pytest.FixtureRequest,
    rabbitdelay_celery_app: object,
    rabbitdelay_broker: RabbitMQServer | Named,
    _rabbitdelay_sessions: list[Session],
) -> Session:
    from celery_rabbitdelay.testing.session import Session

    sessions = _rabbitdelay_sessions
    for server in (rabbitdelay_broker, *(each.redis for each in sessions)):
        if isinstance(server, Server):  # an earlier test may have killed or suspended it
            server.resume() if server.running else server.start()
    if [each.app for each in sessions] != [rabbitdelay_celery_app]:
        while sessions:
            sessions.pop().close()
        redis = partial(request.getfixturevalue, "rabbitdelay_redis")
        session = Session(rabbitdelay_celery_app, rabbitdelay_broker.url, redis)
        sessions.append(session)
        # Finalizers run in reverse order: this finalizer runs before the servers stop.
        request.session.addfinalizer(session.close)
    return sessions[0]


@pytest.fixture
def rabbitdelay_app(_rabbitdelay_session: Session) -> Iterator[Celery]:
    """Return the application, on the servers of this run, with nothing waiting anywhere.

    The delay levels get their own prefix. A registry, and a result backend in Redis, use the Redis
    of this run.
    """
    with _rabbitdelay_session.clean():
        yield _rabbitdelay_session.app


@pytest.fixture
def rabbitdelay_worker(
    request: pytest.FixtureRequest, rabbitdelay_app: Celery, _rabbitdelay_session: Session
) -> Worker | None:
    """Return a worker of the application; it has ``log``, ``kill()`` and ``start()``.

    All tests of an application share one worker process, which is restarted if a test has killed
    it. With ``rabbitdelay_worker = thread``, the worker runs in this process, and the fixture is
    None.
    """
    if _option(request.config, "worker") == "thread":
        _rabbitdelay_session.worker_in_thread()
        return None
    options = shlex.split(_option(request.config, "worker_options")) or ["--concurrency=1"]
    return _rabbitdelay_session.worker(options)


@pytest.fixture
def travel(rabbitdelay_app: Celery, _rabbitdelay_session: Session) -> Iterator[Travel]:
    """Travel in time: ``travel(days=3)`` runs all tasks that are due within three days, at once.

    See :class:`celery_rabbitdelay.testing.Travel`.
    """
    with closing(_rabbitdelay_session.travel()) as traveller:
        yield traveller
