"""``celery rabbitdelay declare``, run as operators do."""

from collections.abc import Callable
from typing import Any

from kombu import Connection
from kombu.common import Broadcast

from celery_rabbitdelay.kombu import Topology, missing
from celery_rabbitdelay.publishing.declaration import is_declared, queue_counts
from tests.kernel.integration.arrivals import wait_until_waiting
from tests.kernel.integration.shop import named
from tests.kernel.integration.worker import answer, run_command


def test_declare_says_what_was_missing_and_declares_it(
    configuration: dict[str, Any], standing: Topology, connection: Connection, channel: Any
) -> None:
    queue = standing.level_queues["ms.x100"][4]
    for part in (queue, standing.exchanges[2], standing.identity.marker):
        part(channel).delete()
    # Nobody can ask for a binding.
    (binding,) = [each for each in standing.bindings if each.pattern == "*.3.#"]
    channel.queue_unbind(binding.target, binding.source, binding.pattern)
    gone = missing(connection, standing)
    assert len(gone) == 3

    assert answer(configuration, "declare --dry-run", "declare", 1)["missing"] == list(gone)
    assert missing(connection, standing) == gone
    told = run_command(configuration, "declare")

    total = len(standing.exchanges) + 2 + len(standing.queues)
    assert f"3 of {total} exchanges and queues of {standing.prefix} were missing" in told.stdout
    assert is_declared(connection, standing)
    route = standing.route(0.3, "nobody")
    connection.Producer().publish("x", exchange=route.exchange, routing_key=route.routing_key)
    # It passes its level, and not the alternate exchange.
    wait_until_waiting(connection, standing.module_queues.distribution.name, 1)
    found = answer(configuration, "declare", "declare")
    assert (found["missing"], found["fingerprint"]) == ([], standing.identity.fingerprint)


def test_declare_with_queues_is_all_that_declare_never_needs(
    configuration: dict[str, Any], make_shop: Callable[..., Any], connection: Connection
) -> None:
    # Without distribution, a task reaches its queue by its binding alone.
    settings: dict[str, Any] = {"rabbitdelay_declare": "never", "rabbitdelay_modules": []}
    own = {"exclusive_queue": True, "broadcast_queue": True}
    shop = make_shop(**settings, **own)
    queues = shop.amqp.queues.values()
    # Each worker has them for itself.
    alone = [each for each in queues if each.exclusive or isinstance(each, Broadcast)]

    found = answer({**configuration, **settings, **own}, "declare --queues", "declare")

    names = [each.name for each in queues if each not in alone]
    assert found["missing_queues"] == found["bound"] == names
    assert set(queue_counts(connection, alone).values()) == {None}
    second = named(shop, "second")
    shop.tasks["look"].apply_async(delay=0.5, queue=second)
    wait_until_waiting(connection, second, 1)
