"""No password of a URL is shown: by no command, error, log, metric or answer of a worker."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen
from uuid import uuid4

import pytest
from celery.bin.base import CLIContext
from click.testing import CliRunner
from kombu.exceptions import OperationalError

from celery_rabbitdelay import Row
from celery_rabbitdelay.command.group import rabbitdelay
from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from celery_rabbitdelay.testing.servers import free_port
from tests.integration.conftest import delete_what_it_declared, small_configuration
from tests.integration.management import wait_until_managed
from tests.integration.metrics import is_served
from tests.integration.shop import PATIENCE, make_app
from tests.integration.test_commands import LEAST
from tests.integration.worker import Worker, run_celery
from tests.node_control import add_user, change_password, close_all_connections, set_tag
from tests.redis_servers import ConfiguredRedis
from tests.told import told

#: The password of every server, and a part of every wrong one.
PLANTED: Final = "opensesame"

USER: Final = "planted"

#: Each command with arguments that let it do its work.
COMMANDS: Final = {
    **LEAST,
    "export": "--format definitions",
    "permissions": "producer",
    "route": "1.5",
}

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
    "pending --due-before amqp://planted:{password}@127.0.0.1:1//",
    "route 1 --layout redis://:{password}@127.0.0.1",
    "status --watch redis://:{password}@127.0.0.1",
    "transfer --from amqp://planted:{password}@127.0.0.1:1//",
    "transfer --from amqp://planted:{password}-wrong@127.0.0.1:{amqp}//",
    "transfer --from amqp://planted:12/{password}@127.0.0.1:1//",
    "transfer --from planted:{password}@127.0.0.1:1",
    "undeliverable list --older-than amqp://planted:{password}@127.0.0.1:1//",
    "verify --management http://planted:{password}-wrong@127.0.0.1:{http}",
    "verify --management http://planted:{password}/@127.0.0.1:1",
    "verify http://planted:{password}@127.0.0.1:1",
)


@pytest.fixture(scope="module")
def node(broker_root: Path | None) -> Iterator[RabbitMQServer]:
    """A broker with its management API, and a user whose password is planted."""
    with RabbitMQServer(broker_root, management=True) as server:
        wait_until_managed(server)
        add_user(server, USER, ".*", ".*", ".*", PLANTED)
        set_tag(server, USER, "administrator")  # verify on 3.10 needs it
        yield server


@pytest.fixture(scope="module")
def redis() -> Iterator[ConfiguredRedis]:
    """The registry's Redis, with that password."""
    with ConfiguredRedis(password=PLANTED) as server:
        yield server


@pytest.fixture
def configure(
    node: RabbitMQServer, redis: ConfiguredRedis, redis_url: str
) -> Iterator[Callable[..., dict[str, Any]]]:
    """Makes configurations with a password in each URL."""
    prefix = f"test-{uuid4().hex[:8]}"

    def configuration(password: str = PLANTED, **more: Any) -> dict[str, Any]:
        broker = f"amqp://{USER}:{password}@127.0.0.1:{node.port}//"
        return {
            **small_configuration(broker, redis_url, prefix),
            # What cannot succeed lasts as long.
            "rabbitdelay_confirm_timeout": 30 if password == PLANTED else 2,
            "rabbitdelay_registry_url": f"redis://:{password}@127.0.0.1:{redis.port}/0",
            **more,
        }

    yield configuration
    app = make_app(configuration())
    delete_what_it_declared(app)
    app.close()


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Everything that is logged in this process."""
    caplog.set_level(logging.DEBUG)
    yield
    assert PLANTED not in caplog.text


class Shown:
    """What commands print, in this process, with what led to their errors.

    Args:
        app: The application.

    Attributes:
        succeeded: The names of those that have.
    """

    def __init__(self, app: Any) -> None:
        self.succeeded = set[str]()
        self._context = CLIContext(app, no_color=True, workdir=None)

    def by(self, command: str) -> str:
        """Run ``celery rabbitdelay COMMAND``; each error has to be one that click prints."""
        result = CliRunner().invoke(
            rabbitdelay, shlex.split(command), obj=self._context, input='{"args": []}\n'
        )
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        error = "" if result.exception is None else told(result.exception)
        if result.exit_code == 0:
            self.succeeded.add(command.split()[0])
        return f"{result.output}\n{result.stderr}\n{error}"


@pytest.mark.parametrize(
    "password", [PLANTED, f"{PLANTED}-wrong", f"{PLANTED}/1", f"12/{PLANTED}", None]
)
def test_no_command_shows_a_password(
    configure: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    password: str | None,
) -> None:
    """The right one, a wrong one, in malformed URLs, and of servers that are away."""
    monkeypatch.chdir(tmp_path)
    app = make_app(configure(**AWAY) if password is None else configure(password))
    shown = Shown(app)
    for name, arguments in COMMANDS.items():
        command = f"{name} {arguments}" + (" --json" if password is None else "")
        assert PLANTED not in shown.by(command), command
    # Otherwise there was little to show.
    if password == PLANTED:
        assert {"declare", "status"} <= shown.succeeded
    else:
        assert shown.succeeded <= {"export", "permissions", "route"}
    app.close()


def test_no_command_repeats_a_password_that_it_was_given(
    configure: Callable[..., dict[str, Any]], node: RabbitMQServer
) -> None:
    http = node.management_url.rpartition(":")[2]
    app = make_app(configure(rabbitdelay_confirm_timeout=2))
    for arguments in ARGUMENTS:
        shown = Shown(app).by(arguments.format(password=PLANTED, amqp=node.port, http=http))
        assert PLANTED not in shown, arguments
        assert "Error: " in shown or "--management" in arguments
    app.close()


def test_no_error_of_a_send_shows_a_password(configure: Callable[..., dict[str, Any]]) -> None:
    registry = configure()["rabbitdelay_registry_url"]
    app = make_app(configure(f"{PLANTED}-wrong", rabbitdelay_registry_url=registry))
    without = make_app(configure(**AWAY))
    look: Any = app.tasks["look"]
    look_away: Any = without.tasks["look"]
    sends: dict[str, Callable[[], object]] = {
        "away": lambda: look_away.apply_async(delay=1),
        "tracked": lambda: look.apply_async(delay=1, track=True, key="order"),
        "send_task": lambda: app.send_task("unknown", countdown=1),
        "send_many": lambda: app.rabbitdelay.send_many(look, [Row(delay=1), Row(delay=1)]),
    }
    asks: dict[str, Callable[[], object]] = {
        "cancel": lambda: without.rabbitdelay.cancel("some-id"),
        "pending": lambda: list(without.rabbitdelay.pending()),
        "job": lambda: without.rabbitdelay.open_job("import", expires=60),
    }
    for name, call in {**sends, **asks}.items():
        with pytest.raises(RegistryUnavailable if name in asks else OperationalError) as raised:
            call()
        assert PLANTED not in told(raised.value), name
    for each in (app, without):
        shown = [repr(each.rabbitdelay.settings), repr(vars(each.rabbitdelay)), each.bugreport()]
        assert PLANTED not in "".join(shown)
        each.close()


def test_a_redis_without_hello_does_not_make_an_error_repeat_the_password(
    configure: Callable[..., dict[str, Any]],
) -> None:
    """Redis before 6.0, and some proxies, repeat the arguments of unknown commands."""
    with ConfiguredRedis("--rename-command", "HELLO", "") as old:
        url = f"redis://:{PLANTED}@127.0.0.1:{old.port}/0"
        app = make_app(configure(rabbitdelay_registry_url=url))
        with pytest.raises(RegistryUnavailable, match="unknown command 'HELLO'") as raised:
            app.rabbitdelay.cancel("some-id")
        assert PLANTED not in told(raised.value) + Shown(app).by("cancel some-id --json")
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
        # Celery itself hides texts by their names, and leaves a URL that is deep in a setting.
        result_backend_transport_options={"nodes": [{"url": f"redis://:{PLANTED}@node"}]},
    )
    app = make_app(configuration)
    look: Any = app.tasks["look"]
    shown: list[str] = []
    with Worker(configuration, None, "--loglevel", "DEBUG") as worker:
        look.apply_async(delay=0.3).get(timeout=PATIENCE)
        assert app.rabbitdelay.send_many(look, [Row(delay=0.3)] * 3).confirmed == 3
        wait_for(lambda: is_served(port), "metrics", PATIENCE)
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as metrics:
            shown.append(metrics.read().decode())
        inspect = f"inspect -t 60 -d {worker.name}"
        management = node.management_url.replace("guest:guest", f"{USER}:{PLANTED}")
        for command in (
            *(f"{inspect} conf", f"{inspect} rabbitdelay_status yes", f"{inspect} report"),
            *(f"{inspect} stats", "report", f"rabbitdelay verify --json --management {management}"),
        ):
            answer = run_celery(configuration, command)
            assert answer.returncode == 0 or "verify" in command, answer.stderr
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
