"""No password of a URL is shown: by no command, error, log, metric or answer of a worker."""

import logging
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen
from uuid import uuid4

import pytest
from kombu.exceptions import OperationalError

from celery_rabbitdelay import Row
from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from celery_rabbitdelay.testing.servers import free_port
from tests.json_schemas import invoke
from tests.kernel.integration.conftest import application, small_configuration
from tests.kernel.integration.shop import PATIENCE, make_app
from tests.kernel.integration.worker import Worker, run_celery
from tests.metrics.integration.metrics import is_served
from tests.node_control import add_user, change_password, close_all_connections, set_tag
from tests.operations.integration.management import node
from tests.redis_servers import ConfiguredRedis
from tests.told import told
from tests.whole.integration.test_commands import LEAST

__all__ = ["node"]

#: The password of every server, and a part of every wrong one and of the key that signs.
PLANTED: Final = "opensesame"

USER: Final = "planted"

#: Commands with arguments that let them do their work.
COMMANDS: Final = (
    *(line for says, lines in LEAST.items() if says for line in lines if line != "delete --yes"),
    *("export --format definitions", "permissions producer", "route 1.5", "delete --yes"),
)

#: Where nobody answers.
AWAY: Final = {
    "broker_url": f"amqp://{USER}:{PLANTED}@127.0.0.1:1//",
    "rabbitdelay_registry_url": f"redis://127.0.0.1:1/0?password={PLANTED}",
    "rabbitdelay_confirm_timeout": 2,
}

#: Arguments that hold a password, some where no URL belongs; ``{port}`` is that of the management.
ARGUMENTS: Final = (
    "amqp://planted:{password}@127.0.0.1:1//",
    "migrate --from-layout amqp://planted:{password}@127.0.0.1:1//",
    "status --timeout redis://:{password}@127.0.0.1",
    "transfer --from amqp://planted:{password}-wrong@127.0.0.1:{amqp}//",
    "transfer --from amqp://planted:12/{password}@127.0.0.1:1//",
    "transfer --from planted:{password}@127.0.0.1:1",
    "undeliverable list --older-than amqp://planted:{password}@127.0.0.1:1//",
    "verify --management http://planted:{password}-wrong@127.0.0.1:{http}",
    "verify --management http://planted:{password}/@127.0.0.1:1",
    "verify http://planted:{password}@127.0.0.1:1",
)


@pytest.fixture(scope="module")
def redis() -> Iterator[ConfiguredRedis]:
    """The registry's Redis, with that password."""
    with ConfiguredRedis(password=PLANTED) as server:
        yield server


@pytest.fixture(scope="module")
def configure(
    node: RabbitMQServer, redis: ConfiguredRedis, redis_url: str
) -> Iterator[Callable[..., dict[str, Any]]]:
    """Makes configurations with a password in each URL."""
    add_user(node, USER, ".*", ".*", ".*", PLANTED)
    set_tag(node, USER, "administrator")  # verify on 3.10 needs it
    prefix = f"test-{uuid4().hex[:8]}"

    def configuration(password: str = PLANTED, **more: Any) -> dict[str, Any]:
        broker = f"amqp://{USER}:{password}@127.0.0.1:{node.port}//"
        given = {
            # What cannot succeed lasts as long.
            "rabbitdelay_confirm_timeout": 30 if password == PLANTED else 2,
            "rabbitdelay_registry_url": f"redis://:{password}@127.0.0.1:{redis.port}/0",
        }
        return {**small_configuration(broker, redis_url, prefix), **given, **more}

    with application(configuration()):
        yield configuration


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Everything that is logged in this process."""
    caplog.set_level(logging.DEBUG)
    yield
    assert PLANTED not in caplog.text


def by_command(app: Any, command: str) -> tuple[bool, str]:
    """Run ``celery rabbitdelay COMMAND`` in this process; its error has to be one of click's.

    Returns:
        Whether it has succeeded, and all that it shows, also of what has led to its error.
    """
    result = invoke(app, shlex.split(command), '{"args": []}\n')
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    error = "" if result.exception is None else told(result.exception)
    return result.exit_code == 0, f"{result.output}\n{result.stderr}\n{error}"


@pytest.mark.parametrize("password", [PLANTED, f"{PLANTED}-wrong", f"12/{PLANTED}", None])
def test_no_command_shows_a_password(
    configure: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    password: str | None,
) -> None:
    """The right one, a wrong one, in malformed URLs, and of servers that are away."""
    monkeypatch.chdir(tmp_path)
    app = make_app(configure(**AWAY) if password is None else configure(password))
    succeeded = set()
    for line in COMMANDS:
        command = line + (" --json" if password is None else "")
        did, shown = by_command(app, command)
        assert PLANTED not in shown, command
        succeeded |= {line.split()[0]} if did else set()
    # Otherwise there was little to show.
    if password == PLANTED:
        assert {"declare", "status"} <= succeeded
    else:
        assert succeeded <= {"export", "permissions", "route"}
    app.close()


def test_no_command_repeats_a_password_that_it_was_given(
    configure: Callable[..., dict[str, Any]], node: RabbitMQServer
) -> None:
    http = node.management_url.rpartition(":")[2]
    app = make_app(configure(rabbitdelay_confirm_timeout=2))
    for arguments in ARGUMENTS:
        given = arguments.format(password=PLANTED, amqp=node.port, http=http)
        _, shown = by_command(app, given)
        assert PLANTED not in shown, arguments
        assert "Error: " in shown or "--management" in arguments
    app.close()


def test_no_error_of_a_call_shows_a_password(configure: Callable[..., dict[str, Any]]) -> None:
    registry = configure()["rabbitdelay_registry_url"]
    refused = make_app(configure(f"{PLANTED}-wrong", rabbitdelay_registry_url=registry))
    away = make_app(configure(**AWAY))
    # Redis before 6.0, and some proxies, repeat the arguments of unknown commands.
    with ConfiguredRedis("--rename-command", "HELLO", "") as old:
        url = f"redis://:{PLANTED}@127.0.0.1:{old.port}/0"
        former = make_app(configure(rabbitdelay_registry_url=url))
        calls: list[tuple[type[Exception], Callable[[], object]]] = [
            (OperationalError, lambda: away.send_task("look", countdown=1)),
            (OperationalError, lambda: refused.send_task("look", countdown=1, track=True)),
            (OperationalError, lambda: refused.rabbitdelay.send_many("look", [Row(delay=1)] * 2)),
            (RegistryUnavailable, lambda: away.rabbitdelay.cancel("some-id")),
            (RegistryUnavailable, lambda: former.rabbitdelay.cancel("some-id")),
        ]
        for error, call in calls:
            with pytest.raises(error) as raised:
                call()
            assert PLANTED not in told(raised.value)
    assert "unknown command 'HELLO'" in str(raised.value)
    for app in (refused, away, former):
        shown = [repr(app.rabbitdelay.settings), repr(vars(app.rabbitdelay)), app.bugreport()]
        assert PLANTED not in "".join(shown)
        app.close()


def test_a_worker_shows_no_password(
    configure: Callable[..., dict[str, Any]], node: RabbitMQServer
) -> None:
    """Not at the level DEBUG, nor in its metrics and answers, nor when its password is changed."""
    port = free_port()
    configuration = configure(
        rabbitdelay_metrics_port=port,
        rabbitdelay_registry_options={"password": PLANTED, "socket_timeout": 10},
        rabbitdelay_track="all",
        rabbitdelay_signing_key=4 * PLANTED,
        # Celery itself hides texts by their names, and leaves a URL that is deep in a setting.
        result_backend_transport_options={"nodes": [{"url": f"redis://:{PLANTED}@node"}]},
    )
    app = make_app(configuration)
    look: Any = app.tasks["look"]
    with Worker(configuration, None, "--loglevel", "DEBUG") as worker:
        look.apply_async(delay=0.3).get(timeout=PATIENCE)
        assert app.rabbitdelay.send_many(look, [Row(delay=0.3)] * 3).confirmed == 3
        wait_for(lambda: is_served(port), "metrics", PATIENCE)
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as metrics:
            shown: list[str] = [metrics.read().decode()]
        status = app.control.broadcast(
            *("rabbitdelay_status", {"about": True}, [worker.name]),
            reply=True,
            timeout=PATIENCE,
            limit=1,
        )
        assert status
        shown.append(str(status))
        for what in ("conf", "report", "stats"):
            answer = run_celery(configuration, f"inspect -t 60 -d {worker.name} {what}")
            assert answer.returncode == 0, answer.stderr
            shown += [answer.stdout, answer.stderr]
        assert "redis://:**@127.0.0.1" in "".join(shown)
        change_password(node, USER, "another")
        try:
            close_all_connections(node, "the password has changed")
            refused = "ACCESS_REFUSED"
            wait_for(lambda: worker.log.count(refused) >= 2, "refused connections", PATIENCE)
        finally:
            change_password(node, USER, PLANTED)
        shown.append(worker.log)
    app.close()
    for text in shown:
        assert PLANTED not in text
