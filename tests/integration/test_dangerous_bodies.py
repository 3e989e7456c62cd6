"""A body that runs code when it is read comes out as Celery treats it: it is refused, unread."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.routing_key import encode_destination
from celery_rabbitdelay.modules.envelope import Item
from celery_rabbitdelay.testing import wait_for
from tests.integration.modules import OPEN, put_in_envelope, wait_until_served
from tests.integration.shop import PATIENCE
from tests.integration.worker import Worker, run_celery

#: How Celery says that a worker does not take a content type.
REFUSED = "Refusing to deserialize"


class Touching:
    """Makes a file when it is unpickled.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self._path,)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """The file that a body makes if it is read."""
    return tmp_path / "made"


@pytest.fixture
def bodies(made: Path) -> dict[str, bytes]:
    """Bodies that make it, by their content type."""
    return {
        "application/x-python-serialize": pickle.dumps([[Touching(made)], {}, {}]),
        "application/x-yaml": f"!!python/object/apply:os.system ['touch {made}']".encode(),
    }


def test_the_bodies_are_dangerous(bodies: dict[str, bytes], made: Path) -> None:
    pickle.loads(bodies["application/x-python-serialize"])
    assert made.exists()


def _headers(**more: Any) -> dict[str, Any]:
    return {"id": "dangerous", "task": "look", "lang": "py", "argsrepr": "", **more}


def _plain(connection: Connection, shop: Any, queue: str, body: bytes, kind: str) -> None:
    """Publish a task without a delay, as Celery does without this package."""
    connection.Producer().publish(body, routing_key=queue, headers=_headers(), content_type=kind)


def _old(connection: Connection, shop: Any, queue: str, body: bytes, kind: str) -> None:
    """Publish a task in Celery's protocol of before 4.0, whose header is in its body."""
    connection.Producer().publish(body, routing_key=queue, content_type=kind)


def _with_eta(connection: Connection, shop: Any, queue: str, body: bytes, kind: str) -> None:
    """Publish a task as without this package; the worker puts it into the levels."""
    eta = (datetime.now(UTC) + timedelta(seconds=1)).isoformat()
    connection.Producer().publish(
        body, routing_key=queue, headers=_headers(eta=eta), content_type=kind
    )


def _by_levels(connection: Connection, shop: Any, queue: str, body: bytes, kind: str) -> None:
    exchange, routing_key = shop.rabbitdelay.topology.route(0.3, queue)[:2]
    assert encode_destination(queue) in routing_key
    connection.Producer().publish(
        body,
        exchange=exchange,
        routing_key=routing_key,
        headers=_headers(**{headers.DUE: int(time.time() * 1000)}),
        content_type=kind,
    )


def _by_check_in(connection: Connection, shop: Any, queue: str, body: bytes, kind: str) -> None:
    connection.Producer().publish(
        body,
        exchange=shop.rabbitdelay.topology.module_queues.checkin.exchange.name,
        routing_key=queue,
        headers=_headers(**{"x-delay": 300}),
        content_type=kind,
    )


def _by_envelope(connection: Connection, shop: Any, queue: str, body: bytes, kind: str) -> None:
    properties = {"content_type": kind, "content_encoding": "binary"}
    item = Item(body, _headers(), properties)
    put_in_envelope(connection, shop, [item], **{headers.EXCHANGE: "", headers.ROUTING_KEY: queue})


#: How a task gets to a worker: without this package, and through it.
ROUTES = (_plain, _old, _with_eta, _by_levels, _by_check_in, _by_envelope)


def _to_nowhere(connection: Connection, shop: Any, queue: str, body: bytes, kind: str) -> None:
    """Publish a task, alone and in an envelope, that ends in ``undeliverable``."""
    _by_check_in(connection, shop, "test-nowhere", body, kind)
    _by_envelope(connection, shop, "test-nowhere", body, kind)


def test_a_dangerous_body_is_refused_on_every_route_as_without_this_package(
    make_shop: Any,
    configuration: dict[str, Any],
    connection: Connection,
    bodies: dict[str, bytes],
    made: Path,
    tmp_path: Path,
) -> None:
    settings = {**configuration, **OPEN, "rabbitdelay_retry_for": 0}
    shop = make_shop(**settings)
    queue = f"{settings['prefix']}.default"
    with Worker(settings) as worker:
        wait_until_served(worker)
        for content_type, body in bodies.items():
            for route in (*ROUTES, _to_nowhere):
                route(connection, shop, queue, body, content_type)
        # In the worker's line about the message, and in the traceback below it.
        expected = 2 * len(ROUTES) * len(bodies)
        wait_for(lambda: worker.log.count(REFUSED) >= expected, f"{expected} refusals", PATIENCE)
        listed = "undeliverable list --messages 9 --json"
        wait_for(
            lambda: json.loads(run_celery(settings, f"rabbitdelay {listed}").stdout)["count"] == 4,
            "undeliverable messages",
            PATIENCE,
        )
        for command in ("list --full", f"export {tmp_path}/exported", "redrive --dry-run"):
            told = run_celery(settings, f"rabbitdelay undeliverable {command} --json")
            assert "Traceback" not in told.stderr
        look = shop.tasks["look"].apply_async((1,), delay=0.1)
        assert look.get(timeout=PATIENCE)["given"] == [1]
        assert worker.log.count(REFUSED) == expected
    assert (tmp_path / "exported").exists()
    assert not made.exists()
