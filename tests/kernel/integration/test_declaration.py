"""Declaring, verifying and deleting a topology on a real broker."""

import re
from typing import Any

import pytest
from amqp.exceptions import AccessRefused
from kombu import Connection, Queue

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.levels.layout import binary
from celery_rabbitdelay.levels.topology import QueueType, Topology
from celery_rabbitdelay.publishing import declaration
from celery_rabbitdelay.publishing.destination import Destination
from celery_rabbitdelay.publishing.producer import DelayedProducer
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.kernel.integration.arrivals import count
from tests.kernel.integration.conftest import SHORT
from tests.kernel.integration.trouble import user


@pytest.mark.parametrize("other", [{"layout": binary()}, {"queue_type": "classic"}])
def test_another_layout_under_the_same_prefix_is_refused_before_any_harm(
    connection: Connection, topology: Topology, other: dict[str, Any]
) -> None:
    declaration.declare(connection, topology)
    with pytest.raises(exceptions.LayoutConflict) as caught:
        declaration.declare(connection, Topology(topology.prefix, **{"layout": SHORT, **other}))
    assert repr(topology.prefix) in str(caught.value)
    assert declaration.missing(connection, topology) == ()


def test_what_is_not_there_as_a_whole_is_declared_on_the_same_connection(
    connection: Connection, topology: Topology
) -> None:
    """As after a process that died while declaring, and after a deletion."""
    channel: Any = connection.default_channel
    topology.identity.guard(channel).declare()
    topology.exchanges[0](channel).declare()
    for _ in range(2):
        assert not declaration.is_declared(connection, topology)
        assert topology.digit_queues[0].name in declaration.missing(connection, topology)
        declaration.declare_if_missing(connection, topology)
        assert declaration.is_declared(connection, topology)
        assert declaration.missing(connection, topology) == ()
        declaration.delete(connection, topology)


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_a_producer_looks_at_the_exchanges_behind_classic_queues(
    connection: Connection, make_topology: Any, queue_type: QueueType
) -> None:
    """The marker exists; only a classic queue drops what the missing exchange does not take."""
    topology = make_topology(queue_type=queue_type)
    declaration.declare(connection, topology)
    declaration.check_complete(connection, topology, by_marker=True)
    declaration.forget(connection)
    gone = topology.exchanges[2]
    gone(connection.default_channel).delete()
    if queue_type == "quorum":
        declaration.check_complete(connection, topology, by_marker=True)
        return
    with pytest.raises(exceptions.TopologyIncomplete) as caught:
        declaration.check_complete(connection, topology, by_marker=True)
    assert caught.value.missing == (gone.name,)


def test_a_topology_is_not_deleted_while_a_consumer_holds_a_message(
    connection: Connection, topology: Topology
) -> None:
    """The message is in no count: the broker calls the queue empty."""
    declaration.declare(connection, topology)
    distribution = topology.module_queues.distribution
    held: list[Any] = []
    with connection.clone() as other:
        channel: Any = other.default_channel
        channel.basic_consume(distribution.name, callback=held.append)
        connection.Producer().publish("held", exchange="", routing_key=distribution.name)
        other.drain_events(timeout=30)
        assert held
        with pytest.raises(exceptions.TopologyInUse) as caught:
            declaration.delete(connection, topology)
        assert caught.value.consumers == {distribution.name: 1}
        assert declaration.missing(connection, topology) == ()
    # It is given back with the connection.
    wait_for(lambda: count(connection, distribution.name) == 1, "the message")
    with pytest.raises(exceptions.TopologyNotEmpty):
        declaration.delete(connection, topology)


def test_the_error_of_a_queue_in_the_way_names_the_queue(
    connection: Connection, topology: Topology
) -> None:
    in_the_way = Queue(topology.digit_queues[2].name, durable=True)
    in_the_way(connection.default_channel).queue_declare()
    with pytest.raises(exceptions.LayoutConflict, match=f"'{in_the_way.name}'"):
        declaration.declare(connection, topology)
    # The broker has ignored the methods behind it, and nothing looks complete.
    assert topology.digit_queues[3].name in declaration.missing(connection, topology)
    assert not declaration.is_declared(connection, topology)


def test_the_error_of_a_user_without_permission_names_the_object(
    private_rabbitmq: RabbitMQServer, prefix: str
) -> None:
    topology = Topology(prefix, SHORT)
    *before, refused, behind = topology.queues[:7]
    exchanges = (topology.identity.guard, *topology.exchanges)
    names = [*(each.name for each in exchanges), *(each.name for each in before)]
    configure = "^(" + "|".join(map(re.escape, names)) + ")$"
    with user(private_rabbitmq, prefix, configure) as url, Connection(url) as connection:
        with pytest.raises(AccessRefused, match=f"queue '{re.escape(refused.name)}'"):
            declaration.declare(connection, topology)
        producer = DelayedProducer(Publisher(connection), topology)
        queue = Queue(refused.name)
        with pytest.raises(
            exceptions.DeclarationRefused, match=f"queue '{re.escape(refused.name)}'"
        ):
            producer.publish_delayed("x", Destination(queue, "", queue.name), 1)
    with Connection(private_rabbitmq.url) as connection:
        # The broker has ignored the methods behind it.
        assert behind.name in declaration.missing(connection, topology)
        declaration.delete(connection, topology)
