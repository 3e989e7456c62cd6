"""What all commands have in common: help without a broker, and one line if it is down."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from celery.bin.base import CLIContext
from celery.platforms import EX_UNAVAILABLE
from click.testing import CliRunner
from redis import Redis

from celery_rabbitdelay import Celery
from celery_rabbitdelay.command.group import rabbitdelay
from celery_rabbitdelay.testing import RabbitMQServer, RedisServer
from tests.integration.shop import PATIENCE
from tests.integration.worker import run_command, start_celery
from tests.json_schemas import checked

#: Nothing listens there.
AWAY = "amqp://guest:secret@127.0.0.1:1//"

#: Each command with the least that it takes to reach for the broker or for Redis; None if it needs
#: neither to start. ``send`` prints a report of its own, with the lines that were not confirmed.
LEAST: dict[str, str | None] = {
    "adopt eta": "some-queue",
    "adopt native": "",
    "adopt nservicebus": "",
    "cancel": "some-id",
    "declare": "",
    "delete": "--yes",
    "export": None,
    "forecast": "",
    "job": "show some-job",
    "migrate": "--from-prefix other --ignore-registry",
    "pause": "--task some-task",
    "pending": "",
    "permissions": None,
    "postpone": "some-id --delay 5",
    "resume": "--task some-task",
    "route": None,
    "run-now": "some-id",
    "schedules backfill": "some-name --since 2030-01-01",
    "schedules delete": "some-name",
    "schedules export": "",
    "schedules import": None,
    "schedules list": "",
    "schedules next": "some-name",
    "schedules pause": "some-name",
    "schedules put-beat": "",
    "schedules resume": "some-name",
    "schedules show": "some-name",
    "schedules trigger": "some-name",
    "send": None,
    "show": "some-id",
    "status": "",
    "transfer": "--from amqp://guest:secret@127.0.0.1:2//",
    "unbind": "some-exchange some-queue some-key",
    "undeliverable export": "never-written.jsonl",
    "undeliverable list": "",
    "undeliverable purge": "--yes",
    "undeliverable redrive": "",
    "verify": "",
    "web": None,
}


def commands(group: click.Group, before: str = "") -> Iterator[str]:
    """Yield the names of all commands, those of groups behind the group's."""
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}"


CONFIGURATION: dict[str, Any] = {
    "prefix": "test-commands",
    "broker_url": AWAY,
    "rabbitdelay_registry_url": "redis://:secret@127.0.0.1:1/0",
    "rabbitdelay_confirm_timeout": 1,
}

OF_REGISTRY = (
    *("cancel", "forecast", "job", "pause", "pending", "postpone", "resume", "run-now", "show"),
    *(each for each in LEAST if each.startswith("schedules ")),
)
ADOPTING = ("adopt eta", "adopt native", "adopt nservicebus")

#: How the line of a command begins that does not say "cannot ask the broker".
SAYS = {
    **dict.fromkeys(OF_REGISTRY, "Error: the registry cannot be used: "),
    **dict.fromkeys(ADOPTING, "Error: 0 messages are moved, "),
    **dict.fromkeys(("adopt eta", "migrate", "transfer"), "Error: cannot reach a broker: "),
}


def test_the_table_has_all_commands() -> None:
    assert list(commands(rabbitdelay)) == sorted(LEAST)


@pytest.mark.parametrize("command", sorted({*LEAST, *(each.split()[0] for each in LEAST)}))
def test_the_help_needs_no_broker(command: str) -> None:
    told = run_command(CONFIGURATION, f"{command} --help")
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("Usage: ")
    assert not told.stderr


@pytest.mark.parametrize(
    ("command", "url"),
    [
        *((name, AWAY) for name, least in LEAST.items() if least is not None),
        ("status", "amqp://guest@nowhere.invalid"),
    ],
)
def test_without_a_broker_a_command_ends_with_one_line(command: str, url: str) -> None:
    whole = f"{command} {LEAST[command]}"
    told = run_command({**CONFIGURATION, "broker_url": url}, whole)
    said = run_command({**CONFIGURATION, "broker_url": url}, f"{whole} --json")
    assert told.returncode == said.returncode == EX_UNAVAILABLE, told.stderr
    (line,) = told.stderr.splitlines()
    assert line.startswith(SAYS.get(command, "Error: cannot ask the broker amqp://guest"))
    assert "secret" not in line
    assert not told.stdout
    assert said.stderr == told.stderr
    assert checked("error", said.stdout) == {"error": line.removeprefix("Error: ")}
    assert not Path("never-written.jsonl").exists()


WRONG_URLS = ["http://:secret@host", "sqs://:secret@host", "memory://"]

#: Arguments of the commands that connect to no server.
BESIDE = {
    "export": "--format mermaid",
    "permissions": "producer --user web",
    "route": "5",
    "schedules import": "-",
    "send": "some-task --by-name",
}


@pytest.mark.parametrize(
    ("command", "setting", "url"),
    [
        *((name, "broker_url", url) for name in LEAST for url in WRONG_URLS),
        *((name, "rabbitdelay_registry_url", url) for name in LEAST for url in WRONG_URLS),
        *(("transfer", "RABBITDELAY_FROM", url) for url in WRONG_URLS),
    ],
)
def test_a_url_of_something_else_is_a_usage_error(
    command: str, setting: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Celery("shop", broker=AWAY, set_as_current=False)
    if setting.isupper():
        monkeypatch.setenv(setting, url)
        line = command
    else:
        app.conf[setting] = url
        line = f"{command} {LEAST[command] or BESIDE.get(command, '')}"
    context = CLIContext(app=app, no_color=True, workdir=None, quiet=False)
    told = CliRunner().invoke(rabbitdelay, line.split(), obj=context)
    app.close()
    assert told.exit_code == 2, told.exception
    assert "Usage: " in told.output
    assert "secret" not in told.output
    assert (url.partition(":")[0] if setting.isupper() else setting) in told.output


ROWS = '{"args": [1], "delay": 60}\n'


@pytest.mark.parametrize(
    ("settings", "command", "says"),
    [
        ({"result_backend": "redis://127.0.0.1:1/0"}, "send look -", "the result_backend does not"),
        ({"result_backend": "redis://h:99999"}, "send look -", "the result_backend: Port out of"),
        ({"result_backend": "nonsense://h"}, "send look -", "the result_backend: No module named"),
        ({"broker_use_ssl": {"nonsense": 1}}, "status", "unexpected keyword argument 'nonsense'"),
        ({"broker_use_ssl": {"ca_certs": "/nowhere"}}, "status", "No such file or directory: '/no"),
        ({"broker_use_ssl": {"certfile": __file__}}, "status", "broker_use_ssl of <Celery"),
        ({"broker_use_ssl": {"cert_reqs": "word"}}, "verify", "broker_use_ssl of <Celery"),
        ({"broker_use_ssl": {"ciphers": "word"}}, "pending", "No cipher can be selected"),
        ({"rabbitdelay_registry_url": "redis://h/word"}, "status", "database is a whole number"),
        ({"rabbitdelay_registry_url": "redis://h:port"}, "status", "database is a whole number"),
        ({"rabbitdelay_registry_url": "unix://"}, "status", "begins with one of redis, rediss"),
        ({"rabbitdelay_web": {"management": "ftp://h"}}, "web", "URL such as http://user"),
        ({"rabbitdelay_web": {"management": "http://h/?x=1"}}, "web", "URL such as http://user"),
    ],
)
def test_what_a_setting_causes_is_one_line(
    configuration: dict[str, Any], settings: dict[str, Any], command: str, says: str
) -> None:
    retries = {"result_backend_transport_options": {"retry_policy": {"max_retries": 1}}}
    told = run_command({**configuration, **retries, **settings}, command, ROWS)
    assert told.returncode in (1, 2)
    assert "Traceback" not in told.stderr
    assert told.stderr.splitlines()[-1].startswith("Error: ")
    assert says in told.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", ["show x", "pending", "cancel x", "job show j"])
def test_a_record_of_the_registry_that_another_program_wrote_is_one_line(
    configuration: dict[str, Any], redis: RedisServer, command: str
) -> None:
    own = {**configuration, "rabbitdelay_registry_url": redis.url, "rabbitdelay_track": "all"}
    assert not run_command(own, "job open j").returncode
    row = '{"args": [1], "delay": 60, "task_id": "x"}'
    assert not run_command(own, "send look -", row).returncode
    client: Any = Redis.from_url(redis.url)
    for key in client.scan_iter():
        if client.type(key) == b"hash":
            client.hset(key, mapping=dict.fromkeys(client.hkeys(key), b"\xff"))
    client.close()
    told = run_command(own, command)
    (line,) = told.stderr.splitlines()
    assert told.returncode == EX_UNAVAILABLE
    assert line.startswith("Error: the registry cannot be used: ")


def test_a_traceback_is_printed_if_it_is_asked_for(
    configuration: dict[str, Any], redis: RedisServer
) -> None:
    own = {**configuration, "rabbitdelay_registry_url": redis.url}
    redis.kill()
    told = run_command(own, "--traceback pending")
    assert "Traceback" in told.stderr
    assert told.stderr.splitlines()[-1].startswith("celery_rabbitdelay.exceptions.RegistryUnavail")


def test_watch_ends_with_a_line_when_the_broker_goes_away(
    configuration: dict[str, Any], shop: Any, private_rabbitmq: RabbitMQServer
) -> None:
    own, pipe = {**configuration, "broker_url": private_rabbitmq.url}, subprocess.PIPE
    command = "rabbitdelay status --timeout 0.1 --watch 0.1"
    with start_celery(own, command, stdout=pipe, stderr=pipe) as watching:
        assert watching.stdout is not None
        while not watching.stdout.readline().startswith("no worker"):
            assert watching.poll() is None
        private_rabbitmq.kill()
        try:
            _, errors = watching.communicate(timeout=PATIENCE)
        finally:
            private_rabbitmq.start()
    assert watching.returncode == EX_UNAVAILABLE
    (line,) = errors.splitlines()
    assert line.startswith("Error: cannot ask the broker ")
