"""A body that runs code when it is read comes out as Celery treats it: it is refused, unread."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.routing_key import encode_destination
from celery_rabbitdelay.modules.envelope import Item
from celery_rabbitdelay.testing import wait_for
from tests.integration.modules import OPEN, Client
from tests.integration.shop import PATIENCE, named
from tests.integration.worker import run_command

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


def _headers(**more: Any) -> dict[str, Any]:
    return {"id": "dangerous", "task": "look", "lang": "py", "argsrepr": "", **more}


#: The routes of :func:`publish_on_every_route`.
ROUTES = 6


def publish_on_every_route(
    connection: Connection, shop: Any, queue: str, body: bytes, kind: str
) -> None:
    publish = partial(connection.Producer().publish, body, content_type=kind)
    # Without a delay, as Celery does without this package.
    publish(routing_key=queue, headers=_headers())
    # In Celery's protocol of before 4.0, whose header is in the body.
    publish(routing_key=queue)
    # With a delay of Celery's own; the worker puts it into the levels.
    eta = (datetime.now(UTC) + timedelta(seconds=1)).isoformat()
    publish(routing_key=queue, headers=_headers(eta=eta))
    # Through the levels, by hand.
    exchange, routing_key = shop.rabbitdelay.topology.route(0.3, queue)[:2]
    assert encode_destination(queue) in routing_key
    due = {headers.DUE: int(time.time() * 1000)}
    publish(exchange=exchange, routing_key=routing_key, headers=_headers(**due))
    publish_by_modules(connection, shop, queue, body, kind)


def publish_by_modules(
    connection: Connection, shop: Any, queue: str, body: bytes, kind: str
) -> None:
    """Publish a task to check-in, and in an envelope."""
    connection.Producer().publish(
        body,
        exchange=shop.rabbitdelay.topology.module_queues.checkin.exchange.name,
        routing_key=queue,
        headers=_headers(**{"x-delay": 300}),
        content_type=kind,
    )
    item = Item(body, _headers(), {"content_type": kind, "content_encoding": "binary"})
    Client(connection, shop).put_in_envelope(queue, item)


def test_a_dangerous_body_is_refused_on_every_route_as_without_this_package(
    serve: Callable[..., Any],
    configuration: dict[str, Any],
    connection: Connection,
    bodies: dict[str, bytes],
    made: Path,
    tmp_path: Path,
) -> None:
    pickle.loads(bodies["application/x-python-serialize"])
    assert made.exists()  # they are dangerous
    made.unlink()
    # Otherwise check-in refuses them itself; see test_client_tasks.
    settings = {**OPEN, "rabbitdelay_retry_for": 0, "rabbitdelay_checkin_trusted": True}
    shop, own = serve(**settings), {**configuration, **settings}
    worker = shop.worker
    for content_type, body in bodies.items():
        publish_on_every_route(connection, shop, named(shop, "default"), body, content_type)
        # It ends in ``undeliverable``.
        publish_by_modules(connection, shop, "test-nowhere", body, content_type)
    # In the worker's line about the message, and in the traceback below it.
    expected = 2 * ROUTES * len(bodies)
    wait_for(lambda: worker.log.count(REFUSED) >= expected, f"{expected} refusals", PATIENCE)
    listed = "undeliverable list --messages 9 --json"
    wait_for(
        lambda: json.loads(run_command(own, listed).stdout)["count"] == 4,
        "undeliverable messages",
        PATIENCE,
    )
    for command in ("list --full", f"export {tmp_path}/exported", "redrive --dry-run"):
        told = run_command(own, f"undeliverable {command} --json")
        assert "Traceback" not in told.stderr
    look = shop.tasks["look"].apply_async((1,), delay=0.1)
    assert look.get(timeout=PATIENCE)["given"] == [1]
    assert worker.log.count(REFUSED) == expected
    assert (tmp_path / "exported").exists()
    assert not made.exists()
