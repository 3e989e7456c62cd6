"""The permissions that each user of the broker needs, as ``rabbitmqctl`` sets them. Asks no broker.

https://www.rabbitmq.com/docs/access-control
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from kombu import Queue

from celery_rabbitdelay.levels.routing_key import encode_destination
from celery_rabbitdelay.levels.topology import Topology

__all__ = [
    "PERMISSIONS",
    "ROLES",
    "Right",
    "Role",
    "TopicRight",
    "commands",
    "patterns",
    "rights",
    "topic_rights",
]

Role: TypeAlias = Literal["producer", "worker", "check-in", "operator"]

#: The users of a broker.
ROLES: Final = get_args(Role)

Permission: TypeAlias = Literal["configure", "write", "read"]

#: The kinds of permissions, in the order of ``rabbitmqctl set_permissions``.
PERMISSIONS: Final = get_args(Permission)

#: The queues and exchanges of Celery's remote control and events.
CELERYS_OWN: Final = r"(.*\.)?celery\.pidbox|celeryev(\..*)?"


class Right(NamedTuple):
    """A permission on all queues and exchanges whose names match a regular expression.

    Attributes:
        permission: The kind of permission.
        pattern: The expression, for the whole name.
        purpose: What needs it.
    """

    permission: Permission
    pattern: str
    purpose: str


class TopicRight(NamedTuple):
    """A topic permission: the routing keys that a user may publish with to a topic exchange.

    Attributes:
        exchange: The exchange's name.
        write: A regular expression for the keys.
    """

    exchange: str
    write: str


def rights(
    role: Role,
    topology: Topology,
    queues: Sequence[Queue],
    *,
    may_declare: bool,
    modules: Sequence[str] = ("check-in", "distribution"),
) -> Iterator[Right]:
    """Yield what a user needs.

    Args:
        role: The user.
        topology: The levels.
        queues: The queues of the tasks that it sends or runs, with their exchanges. Those with
            ``no_declare`` are declared by somebody else.
        may_declare: Whether ``rabbitdelay_declare`` is "auto".
        modules: The modules that a worker serves.
    """
    prefix = re.escape(topology.name_prefix)
    # Former generations of the levels too.
    everything, declared = rf"{re.escape(topology.prefix)}\..*", _declared(queues)
    match role:
        case "producer" if may_declare:
            yield from _all_of(everything, "declare the levels and send into them")
            yield from _all_of(declared, "declare the queues of the tasks")
        case "producer":
            yield Right("write", rf"{prefix}\.[^.]+\.x[0-9]+", "send into the levels")
            yield Right("write", rf"{prefix}\.delivery", "send tasks that are due at once")
        case "worker":
            yield from _rights_of_worker(topology, queues, may_declare, modules)
        case "check-in":
            yield Right("write", rf"{prefix}\.checkin", "hand in messages")
        case "operator":
            yield from _all_of(everything, "declare, look at and move what waits")
            yield from _all_of(declared, "declare the queues of the tasks")
            yield from _all_of(r"amq\.gen.*", "compare the clocks (verify)")
            yield Right("write", r"amq\.default", "redrive messages, compare the clocks")


def _rights_of_worker(
    topology: Topology, queues: Sequence[Queue], may_declare: bool, modules: Sequence[str]
) -> Iterator[Right]:
    prefix = re.escape(topology.prefix)
    names, sources = _either(queue.name for queue in queues), _either(_exchanges(queues))
    if may_declare:
        yield from _all_of(rf"{prefix}\..*", "declare the levels, and put tasks into them")
    else:
        yield Right("write", rf"{prefix}\..*", "put tasks into the levels")
        served = [
            re.escape(queue.name)
            for each in (topology, *topology.former)
            for module, queue in (
                ("check-in", each.module_queues.checkin),
                ("distribution", each.module_queues.distribution),
            )
            if module in modules
        ]
        if served:
            yield Right("read", "|".join(served), "serve the modules")
    yield Right("write", r"amq\.default", "hand due tasks to their queues (distribution)")
    if sources:
        yield Right("write", sources, "hand due tasks to their exchanges (distribution)")
    yield Right("read", names, "run the tasks")
    yield from _all_of(_declared(queues), "declare the queues of the tasks")
    yield from _all_of(CELERYS_OWN, "Celery's remote control and events")


def topic_rights(topology: Topology, queues: Sequence[Queue]) -> Iterator[TopicRight]:
    r"""Yield the topic permissions of a producer that may delay tasks for some queues only.

    An exchange without a topic permission takes every key, so each of the levels has one. A key has
    as many digits as there are levels, because a key that matches no binding would reach
    distribution, which looks into the headers. The expressions end with ``\z``: ``$`` would also
    match before a line feed at the end of a key.

    Args:
        topology: The levels.
        queues: The queues.
    """
    shard = r"s[0-9]+\." if topology.shards > 1 else ""
    words = _either(encode_destination(queue.name) for queue in queues)
    pattern = rf"^{shard}([0-9]+\.){{{len(topology.layout.levels)}}}({words})\z"
    for exchange in topology.exchanges:
        if exchange.type == "topic":
            yield TopicRight(exchange.name, pattern)


def patterns(given: Iterable[Right]) -> tuple[str, str, str]:
    """Return the three arguments of ``rabbitmqctl set_permissions``; empty for no permission."""
    wanted: dict[str, list[str]] = {permission: [] for permission in PERMISSIONS}
    for right in given:
        if right.pattern not in wanted[right.permission]:
            wanted[right.permission].append(right.pattern)
    configure, write, read = (f"^({'|'.join(each)})$" if each else "" for each in wanted.values())
    return configure, write, read


def commands(
    user: str,
    virtual_host: str,
    given: Iterable[Right],
    topics: Iterable[TopicRight] = (),
) -> Iterator[str]:
    """Yield the commands for a shell that give a user permissions, in place of all former ones."""
    where = f"-p {shlex.quote(virtual_host)} {shlex.quote(user)}"
    yield f"rabbitmqctl set_permissions {where} {' '.join(map(_quoted, patterns(given)))}"
    for exchange, write in topics:
        yield f"rabbitmqctl set_topic_permissions {where} {exchange} {_quoted(write)} ''"


def _quoted(pattern: str) -> str:
    quoted = shlex.quote(pattern)
    return quoted if quoted.startswith("'") else f"'{quoted}'"


def _all_of(pattern: str, purpose: str) -> Iterator[Right]:
    if pattern:
        for permission in PERMISSIONS:
            yield Right(permission, pattern, purpose)


def _declared(queues: Sequence[Queue]) -> str:
    """Return the expression for the queues that an application declares, and their exchanges."""
    declared = [queue for queue in queues if not getattr(queue, "no_declare", False)]
    return _either([*(queue.name for queue in declared), *_exchanges(declared)])


def _exchanges(queues: Sequence[Queue]) -> list[str]:
    sources = [
        source
        for queue in queues
        for source in (queue.exchange, *(binding.exchange for binding in queue.bindings))
    ]
    return [source.name for source in sources if source is not None and source.name]


def _either(names: Iterable[str]) -> str:
    return "|".join(dict.fromkeys(map(re.escape, names)))
