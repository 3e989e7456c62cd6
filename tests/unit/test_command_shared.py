"""The connection to another broker than the application's, and the version."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.bin.base import CLIContext

from celery_rabbitdelay import Celery, __version__
from celery_rabbitdelay.command.shared import broker_at


@pytest.fixture
def app() -> Iterator[Any]:
    """An application whose broker takes TLS."""
    made = Celery("shop", broker="amqps://here.example.com//", set_as_current=False)
    yield made
    made.close()


def names_asked_for(app: Any, url: str) -> tuple[str, str]:
    """Return whose certificates the brokers have to have: the application's, and the other one."""
    context = CLIContext(app=app, no_color=True, workdir=None, quiet=False)
    other, here = broker_at(context, url), app.connection_for_write()
    connections = [here, other, here.clone(), other.clone()]
    for connection in connections:
        # kombu decides it when it connects.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connection.transport, "Connection", NotOpened)
            connection.transport.establish_connection()
    names = [connection.ssl["server_hostname"] for connection in connections]
    assert names[:2] == names[2:]
    return names[0], names[1]


class NotOpened:
    """Takes the place of py-amqp's connection, which would look for the host."""

    def __init__(self, **options: Any) -> None:
        self.client: Any = None

    def connect(self) -> None:
        """Connect to nothing."""


@pytest.mark.parametrize("named", [None, "here.example.com"])
def test_each_broker_s_certificate_is_for_its_own_host(app: Any, named: str | None) -> None:
    app.conf.broker_use_ssl = {"ca_certs": "ca.pem", "server_hostname": named}
    asked = names_asked_for(app, "amqps://there.example.com//")
    assert asked == ("here.example.com", "there.example.com")


@pytest.mark.parametrize(
    ("url", "settings", "ssl"),
    [
        ("amqps://there//", {"ca_certs": "ca.pem"}, {"ca_certs": "ca.pem"}),
        ("amqps://there//", True, True),
        ("amqps://there//", False, True),
        ("amqp://there//", {"ca_certs": "ca.pem"}, False),
    ],
)
def test_the_url_says_whether_it_is_tls(app: Any, url: str, settings: Any, ssl: Any) -> None:
    app.conf.broker_use_ssl = settings
    context = CLIContext(app=app, no_color=True, workdir=None, quiet=False)
    assert broker_at(context, url).ssl == ssl


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["rabbitdelay", "--version"], f"celery-rabbitdelay, version {__version__}"),
        (["-A", "shop", "report"], f"package  -> celery-rabbitdelay:{__version__}"),
    ],
)
def test_celery_says_which_version_this_is(command: list[str], line: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("from celery_rabbitdelay import Celery\napp = Celery()\n")
    celery = [sys.executable, "-m", "celery", *command]
    run = subprocess.run(celery, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert line in run.stdout.splitlines()
