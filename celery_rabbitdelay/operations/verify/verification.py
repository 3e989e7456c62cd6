"""Find what on a broker breaks a promise of the levels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from amqp.exceptions import AMQPError
from kombu import Connection

from celery_rabbitdelay.exceptions import ManagementUnavailable
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.generations import former_generations
from celery_rabbitdelay.operations.verify.amqp_probes import Probes, check_clock, clock_difference
from celery_rabbitdelay.operations.verify.application import Application
from celery_rabbitdelay.operations.verify.broker import check_features, check_version
from celery_rabbitdelay.operations.verify.destinations import check_destinations, destinations_of
from celery_rabbitdelay.operations.verify.finding import Finding, Report, merged
from celery_rabbitdelay.operations.verify.generations import check_generations
from celery_rabbitdelay.operations.verify.inventory import Inventory, read_inventory
from celery_rabbitdelay.operations.verify.layout import check_layout, check_queue_type
from celery_rabbitdelay.operations.verify.management_api import ManagementAPI
from celery_rabbitdelay.operations.verify.orphans import check_orphans
from celery_rabbitdelay.operations.verify.policies import Role, check_policies
from celery_rabbitdelay.operations.verify.replicas import check_nodes, check_replicas
from celery_rabbitdelay.publishing.declaration import connect
from celery_rabbitdelay.publishing.wire import Wire

#: Seconds that an answer of the broker may take.
ANSWER_TIMEOUT: Final = 30.0

#: What only the management API shows.
ONLY_THERE: Final = (
    "bindings",
    "policies and operator policies",
    "replicas and quorum health",
    "nodes and alarms",
    "feature flags and deprecated features",
    "queues that refuse or drop tasks by a policy",
    "consumers of the levels",
    "orphans of older layouts",
)


def verify(
    connection: Connection,
    application: Application,
    management: ManagementAPI | None = None,
    now: Callable[[], float] = time.time,
) -> Report:
    """Look at a broker, and change nothing.

    Args:
        connection: Any kombu connection to RabbitMQ, as the application's own user.
        application: What the application needs.
        management: The management API; without it, or if it does not answer, only what AMQP tells
            is checked.
        now: Returns seconds since the epoch: this machine's clock.

    Raises:
        OSError: The broker cannot be reached, or does not answer.
    """
    connect(connection)
    version = str(connection.connection.server_properties.get("version", "0"))
    not_seen: list[str] = []
    virtual_host = connection.virtual_host or "/"
    inventory = _inventory(management, virtual_host, not_seen)
    findings = [*check_version(version), *check_queue_type(application.topology)]
    with Wire(connection).answers_within(ANSWER_TIMEOUT):
        try:
            former = former_generations(connection, application.topology)
            findings += check_generations(application.topology, former)
        except AMQPError as error:
            not_seen.append(f"former generations: {' '.join(str(error).split())}")
        probes = Probes(connection, application)
        try:
            findings += _by_amqp(probes, application, inventory, not_seen)
            if inventory is not None:
                findings += _by_management(probes, application, inventory, virtual_host)
        finally:
            probes.close()
    if inventory is not None and inventory.alarms:
        not_seen.append("the broker's clock: it takes no messages because of an alarm")
    else:
        try:
            findings += check_clock(clock_difference(connection, now), application)
        except (AMQPError, OSError) as error:
            not_seen.append(f"the broker's clock: {' '.join(str(error).split())}")
    return Report(version, application.topology.prefix, merged(findings), tuple(not_seen))


def _inventory(
    management: ManagementAPI | None, virtual_host: str, not_seen: list[str]
) -> Inventory | None:
    why = "no management API is given"
    try:
        if management is not None:
            inventory = read_inventory(management, virtual_host)
            not_seen += inventory.not_seen
            return inventory
    except ManagementUnavailable as error:
        why = str(error)
    not_seen += [f"{what}: {why}" for what in ONLY_THERE]
    return None


def _by_amqp(
    probes: Probes, application: Application, inventory: Inventory | None, not_seen: list[str]
) -> Iterator[Finding]:
    """What the application's own user finds; what exists and differs only without an inventory."""
    if inventory is None:
        exist, findings = probes.existing()
        yield from findings
    else:
        exist = {f"exchange {name}" for name in inventory.exchanges}
        exist.update(f"queue {name}" for name in inventory.queues)
    if application.may_declare:
        for finding in probes.declarations(exist):
            if inventory is None or finding.code.startswith("permission-"):
                yield finding
    elif inventory is None:
        not_seen.append("arguments: rabbitdelay_declare is 'never', so nothing may be declared")
    yield from probes.permissions(exist)


def _by_management(
    probes: Probes, application: Application, inventory: Inventory, virtual_host: str
) -> Iterator[Finding]:
    topology = application.topology
    destinations = destinations_of(application, inventory)
    roles = _roles(topology)
    roles |= dict.fromkeys(destinations, "destination")
    yield from check_features(inventory)
    yield from check_nodes(inventory)
    yield from check_layout(application, inventory)
    yield from check_destinations(application, inventory)
    yield from check_policies(inventory, roles, topology.prefix, virtual_host)
    yield from check_replicas(inventory, roles)
    yield from check_orphans(topology, inventory, probes.messages)


def _roles(topology: Topology) -> dict[str, Role]:
    modules = topology.module_queues
    roles: Mapping[Role, tuple[str, ...]] = {
        "level": (*(queue.name for queue in topology.digit_queues), modules.meditation.name),
        "module": (modules.checkin.name, modules.distribution.name),
        "undeliverable": (modules.undeliverable.name,),
    }
    return {name: role for role, names in roles.items() for name in names}
