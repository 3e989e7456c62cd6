"""The connection to another broker."""

from collections.abc import Iterator
from typing import Any, cast
from unittest import mock

import pytest

from celery_rabbitdelay import Celery
from celery_rabbitdelay.operations.move_commands import broker_at


@pytest.fixture
def app() -> Iterator[Any]:
    """An application whose broker takes TLS."""
    made = Celery("shop", broker="amqps://here.example.com//", set_as_current=False)
    yield made
    made.close()


@pytest.mark.parametrize("named", [None, "here.example.com"])
def test_each_broker_s_certificate_is_for_its_own_host(
    app: Any, named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.conf.broker_use_ssl = {"ca_certs": "ca.pem", "server_hostname": named}
    here, other = app.connection_for_write(), broker_at(app, "amqps://there.example.com//")
    names = []
    for connection in (here, other, here.clone(), other.clone()):
        # kombu decides it when it connects.
        monkeypatch.setattr(connection.transport, "Connection", mock.Mock())
        connection.transport.establish_connection()
        names.append(cast("dict[str, Any]", connection.ssl)["server_hostname"])
    assert names == ["here.example.com", "there.example.com"] * 2


def test_the_url_says_whether_it_is_tls(app: Any) -> None:
    for url, setting, ssl in (
        ("amqps://there//", {"ca_certs": "ca.pem"}, {"ca_certs": "ca.pem"}),
        ("amqps://there//", False, True),
        ("amqp://there//", {"ca_certs": "ca.pem"}, False),
    ):
        app.conf.broker_use_ssl = setting
        assert broker_at(app, url).ssl == ssl
