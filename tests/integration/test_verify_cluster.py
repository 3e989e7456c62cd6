"""``verify`` on a cluster of three: nothing if it is sound, and the replicas that are missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.publishing.declaration import declare_destination
from celery_rabbitdelay.testing import RabbitMQServer
from tests.integration.management import QUORUM, Place, place_on, wait_until_managed


@pytest.fixture(scope="module")
def cluster(broker_root: Path | None) -> Iterator[list[RabbitMQServer]]:
    """Three nodes of one cluster, the first one with its management API."""
    with ExitStack() as stack:
        first = stack.enter_context(RabbitMQServer(broker_root, management=True))
        joining = [
            RabbitMQServer(broker_root, cluster_with=first, management=True) for _ in range(2)
        ]
        nodes = [first, *(stack.enter_context(node) for node in joining)]
        wait_until_managed(first)
        yield nodes


@pytest.fixture
def place(cluster: list[RabbitMQServer]) -> Iterator[Place]:
    """Sound levels and a destination in a virtual host of this test's own."""
    with place_on(cluster[0]) as place:
        yield place
        # Without a majority of its queues, a virtual host takes more than a minute to delete.
        for node in cluster:
            if not node.running:
                node.start()


def test_nothing_is_found_on_a_sound_cluster(place: Place) -> None:
    assert place.verify().findings == ()


def test_what_a_node_takes_with_it_is_found(cluster: list[RabbitMQServer], place: Place) -> None:
    *_, third = cluster
    classic = Queue("classic", queue_arguments={})
    half = Queue("half", queue_arguments={**QUORUM, "x-quorum-initial-group-size": 2})
    place.destinations += [classic, half]
    with Connection(f"{third.url.removesuffix('//')}/{place.name}") as connection:
        # Classic queues are on the node where they are declared, quorum queues there and elsewhere.
        for queue in (classic, half):
            declare_destination(connection, place.topology, queue)
    report = place.verify_until({"replicas-few", "destination-classic"})
    assert report.findings[0].what == "it has 2 replicas in a cluster of 3 nodes"

    third.kill()

    codes = {"destination-classic", "quorum-lost", "replica-offline", "replicas-few"}
    report = place.verify_until({*codes, "unreachable"})
    subjects = {finding.code: finding.subjects for finding in report.findings}
    assert subjects["unreachable"] == ("queue classic",)
    assert subjects["quorum-lost"] == ("queue half",)
    assert {f"queue {queue.name}" for queue in place.topology.queues} <= {
        *subjects["replica-offline"]
    }
