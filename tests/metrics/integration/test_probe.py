"""Probes show each way in which delays stop ending in time, and nothing on a sound broker."""

import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
from kombu import Connection

from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.levels.layout import custom
from celery_rabbitdelay.levels.topology import CHECK_IN, DISTRIBUTE, PROBE, Topology
from celery_rabbitdelay.metrics.probe import ROUTE, ProbeService
from celery_rabbitdelay.operations.checks import check_probes
from celery_rabbitdelay.operations.workers import status_of_workers
from celery_rabbitdelay.publishing.declaration import declare, queue_counts
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.kernel.integration.arrivals import count
from tests.kernel.integration.worker import Worker
from tests.node_control import clear_policy, evaluate, set_policy

#: It has the command that starts the supervisor of dead-lettering again.
PAGE: Final = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "declare.md"

#: A level through which a probe needs an expiration; one of five seconds, and one of one.
LAYOUT: Final = custom([("long", 3, 70), ("fives", 14, 5), ("seconds", 5, 1)])

#: Rounds without a false alarm, and seconds between two of them. 10,080 are a week's minutes.
ROUNDS: Final = int(os.environ.get("RABBITDELAY_PROBE_ROUNDS", "20"))
ROUND: Final = 0.05

#: Seconds between two rounds of the troubles, and how many times as fast as by default that is.
INTERVAL: Final = float(os.environ.get("RABBITDELAY_PROBE_INTERVAL", "1"))
FASTER: Final = 60.0 / INTERVAL

#: Seconds until a probe is missing there; and until something has to be seen: three minutes.
MISSING_AFTER: Final = max(60.0 / FASTER, 8.0)
PATIENCE: Final = max(180.0 / FASTER, 60.0)


@pytest.fixture
def serve_probe(connection: Connection, make_topology: Any) -> Iterator[Any]:
    """Starts a service of probes; with a round a second, one is missing after 8 s."""
    with ExitStack() as services:

        def serve(interval: float = INTERVAL, missing_after: float = MISSING_AFTER) -> ProbeService:
            topology: Topology = make_topology(LAYOUT)
            service = ProbeService(
                connection.clone(transport_options={"confirm_publish": True}),
                lambda opened: declare(opened, topology),
                lambda: None,
                topology,
                interval=interval,
                missing_after=missing_after,
            )
            service.start()
            services.callback(service.stop)
            wait_for(
                lambda: set(service.late) == {ROUTE, *topology.level_queues}, "the probes", 180
            )
            return service

        yield serve


def seen(service: ProbeService) -> set[str]:
    """Return the levels that ``verify`` complains about, with its bounds scaled like the rounds."""
    scale = max(30.0 / MISSING_AFTER, 1.0)
    late = {level: late * scale for level, late in service.late.items()}
    rows = check_probes(Settings(prefix="p"), {"worker": {"probe": {"prefix": "p", "late": late}}})
    return {subject.removeprefix("level ") for _, subject, _ in rows}


@pytest.mark.timeout(3600)
def test_a_sound_broker_raises_nothing(
    serve_probe: Callable[..., ProbeService], connection: Connection
) -> None:
    service = serve_probe(ROUND, 60.0)
    worst = [0.0, 0.0]

    def is_over() -> bool:
        found = tuple(service.late.values())
        worst[:] = min(worst[0], *found), max(worst[1], *found)
        return service.rounds >= ROUNDS

    wait_for(is_over, "the rounds", 3500.0)
    assert set(service.missing.values()) == {0}
    assert -1.0 < worst[0] <= worst[1] < 30.0
    assert count(connection, service.topology.module_queues.undeliverable.name) == 0


Undo = Callable[[], object]


def short_ttl(node: RabbitMQServer, topology: Topology, channel: Any) -> Undo:
    policy = set_policy(node, "/", rf"^{topology.prefix}\.fives\.", message_ttl=100)
    return lambda: clear_policy(node, "/", policy)


def unbound(node: RabbitMQServer, topology: Topology, channel: Any) -> Undo:
    bound = [each for each in topology.bindings if each.source.endswith(".fives.x1")]
    (pattern,) = [each.pattern for each in bound if each.target.endswith(".fives.1")]
    where = (f"{topology.prefix}.fives.1", f"{topology.prefix}.fives.x1", pattern)
    channel.queue_unbind(*where)
    return lambda: channel.queue_bind(*where)


def without_supervisor(node: RabbitMQServer, topology: Topology, channel: Any) -> Undo:
    evaluate(node, "supervisor:terminate_child(rabbit_sup, rabbit_fifo_dlx_sup)")
    (command,) = re.findall(r"^(rabbitmqctl eval '\{ok.*?\]\.')$", PAGE.read_text(), re.M | re.S)
    return lambda: node.ctl(*shlex.split(command)[1:])


@pytest.mark.timeout(max(PATIENCE * 5, 300))
@pytest.mark.parametrize(
    ("trouble", "levels"),
    [
        (short_ttl, {"fives.x1"}),
        (unbound, {"fives.x1"}),
        (without_supervisor, {ROUTE, "long.x1", "fives.x1", "seconds.x1"}),
    ],
)
def test_each_trouble_is_seen_and_is_over_once_it_is_mended(
    serve_probe: Callable[..., ProbeService],
    private_rabbitmq: RabbitMQServer,
    channel: Any,
    trouble: Callable[[RabbitMQServer, Topology, Any], Undo],
    levels: set[str],
) -> None:
    service = serve_probe()
    wait_for(lambda: service.rounds >= 2, "two rounds", PATIENCE)
    assert seen(service) == set(), service.late
    mend = trouble(private_rabbitmq, service.topology, channel)
    try:
        wait_for(lambda: seen(service) >= levels, "the trouble", PATIENCE)
        assert seen(service) == levels
        assert trouble is short_ttl or all(service.missing[level] for level in levels)
    finally:
        mend()
    wait_for(lambda: not seen(service), "the end of the trouble", PATIENCE)


def test_the_next_worker_goes_on_if_the_active_one_is_killed(
    shop: Any, configuration: dict[str, Any], connection: Connection
) -> None:
    # What each worker that sends probes has said of them, when it was asked last.
    told: dict[str, Any] = {}

    def probes() -> set[str]:
        """Ask which workers send probes."""
        told.clear()
        for name, each in status_of_workers(shop, connection, 1.0).items():
            if each.get("probe", {}).get("late"):
                told[name] = each["probe"]
        return set(told)

    first, second = (
        Worker({**configuration, "rabbitdelay_modules": (CHECK_IN, DISTRIBUTE, PROBE)})
        for _ in range(2)
    )
    with first, second:
        wait_for(probes, "an active worker", PATIENCE)
        (active,) = told
        killed, other = (first, second) if active == first.name else (second, first)
        killed.kill()
        levels = {ROUTE, *shop.rabbitdelay.topology.level_queues}
        wait_for(
            lambda: probes() == {other.name} and set(told[other.name]["late"]) == levels,
            "the other worker",
            PATIENCE,
        )
        assert told[other.name]["missing"] == dict.fromkeys(levels, 0)
        assert queue_counts(connection, [shop.rabbitdelay.topology.probe]).popitem()[1] == (0, 1)
