"""A body that runs code when it is read comes out as Celery treats it: it is refused, unread."""

import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from kombu import Connection

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.modules.envelope import Item
from celery_rabbitdelay.testing import wait_for
from tests.kernel.integration.arrivals import wait_until_waiting
from tests.kernel.integration.modules import OPEN, Client
from tests.kernel.integration.shop import PATIENCE, named
from tests.kernel.integration.worker import run_command

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


#: How Celery names a pickled body.
PICKLE = "application/x-python-serialize"


def publish_on_every_route(connection: Connection, shop: Any, queue: str, body: bytes) -> int:
    """Publish a task that nobody may unpickle; return how many copies."""
    publish = partial(connection.Producer().publish, body, content_type=PICKLE)
    task = {"id": "dangerous", "task": "look", "lang": "py", "argsrepr": ""}
    # Without a delay, as Celery does without this package; and in its protocol of before 4.0.
    publish(routing_key=queue, headers=task)
    publish(routing_key=queue)
    # With a delay of Celery's own; the worker puts it into the levels.
    eta = (datetime.now(UTC) + timedelta(seconds=1)).isoformat()
    publish(routing_key=queue, headers={**task, "eta": eta})
    # Through the levels, by hand.
    topology = shop.rabbitdelay.topology
    exchange, key = topology.route(0.3, queue)[:2]
    publish(exchange=exchange, routing_key=key, headers={**task, headers.DUE: 5})
    # Through the modules; those for the other queue are undeliverable.
    checkin = topology.module_queues.checkin.exchange.name
    item = Item(body, task, {"content_type": PICKLE, "content_encoding": "binary"})
    for each in (queue, "test-nowhere"):
        publish(exchange=checkin, routing_key=each, headers={**task, "x-delay": 300})
        Client(connection, shop).put_in_envelope(each, item)
    return 6


def test_a_dangerous_body_is_refused_on_every_route_as_without_this_package(
    serve: Callable[..., Any],
    configuration: dict[str, Any],
    connection: Connection,
    tmp_path: Path,
) -> None:
    made = tmp_path / "made"
    body = pickle.dumps([[Touching(made)], {}, {}])
    pickle.loads(body)
    assert made.exists()  # it is dangerous
    made.unlink()
    # Otherwise check-in refuses them itself; see test_client_tasks.
    settings = {**OPEN, "rabbitdelay_retry_for": 0, "rabbitdelay_checkin_trusted": True}
    shop, own = serve(**settings), {**configuration, **settings}
    worker = shop.worker
    # In the worker's line about the message, and in the traceback below it.
    expected = 2 * publish_on_every_route(connection, shop, named(shop, "default"), body)
    wait_for(lambda: worker.log.count(REFUSED) >= expected, f"{expected} refusals", PATIENCE)
    wait_until_waiting(connection, shop.rabbitdelay.topology.module_queues.undeliverable.name, 2)
    for command in ("list -n 9", "export", "redrive --dry-run"):
        told = run_command(own, f"undeliverable {command} --json")
        assert "Traceback" not in told.stderr
    look = shop.tasks["look"].apply_async((1,), delay=0.1)
    assert look.get(timeout=PATIENCE)["given"] == [1]
    assert worker.log.count(REFUSED) == expected
    assert not made.exists()
