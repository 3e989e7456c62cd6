"""The permissions that each user of the broker needs, as ``rabbitmqctl`` sets them. Asks no broker.

https://www.rabbitmq.com/docs/access-control
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from kombu import Exchange, Queue
from kombu.common import Broadcast

from celery_rabbitdelay.levels.routing_key import encode_destination
from celery_rabbitdelay.levels.topology import Topology

Role: TypeAlias = Literal["producer", "worker", "check-in", "operator"]

#: The users of a broker.
ROLES: Final = get_args(Role)

Permission: TypeAlias = Literal["configure", "write", "read"]

#: The kinds of permissions, in the order of ``rabbitmqctl set_permissions``.
PERMISSIONS: Final = get_args(Permission)

#: The names that kombu and Celery make up for queues: of replies, and at the end of broadcasts'.
_UUID: Final = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


class CelerysOwn(NamedTuple):
    """The queues and exchanges of Celery's remote control, events and results by messages.

    Attributes:
        control_exchange: The setting ``control_exchange``.
        event_exchange: The setting ``event_exchange``.
        event_queue_prefix: The setting ``event_queue_prefix``.
        has_replies: Whether the result backend is ``rpc://``: each process that sends tasks then
            has a queue for their results, and workers publish to it over the default exchange.
    """

    control_exchange: str = "celery"
    event_exchange: str = "celeryev"
    event_queue_prefix: str = "celeryev"
    has_replies: bool = False

    @classmethod
    def of(cls, conf: Any) -> CelerysOwn:
        """Return those of an application, from its ``conf``."""
        backend = str(conf.result_backend or "")
        return cls(
            conf.control_exchange,
            conf.event_exchange,
            conf.event_queue_prefix,
            backend.partition(":")[0] == "rpc",
        )

    @property
    def pattern(self) -> str:
        """The expression for those of remote control and events."""
        control = rf"(.*\.)?{re.escape(self.control_exchange)}\.pidbox"
        exchange, queues = re.escape(self.event_exchange), re.escape(self.event_queue_prefix)
        if exchange == queues:
            return rf"{control}|{exchange}(\..*)?"
        return rf"{control}|{exchange}|{queues}\..*"


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
    celerys_own: CelerysOwn = CelerysOwn(),  # noqa: B008 - immutable
) -> Iterator[Right]:
    """Yield what a user needs.

    Args:
        role: The user.
        topology: The levels. The rights are for their former generations too, because
            applications that still use these share a user with those that do not.
        queues: The queues of the tasks that it sends or runs, with their exchanges. Those with
            ``no_declare`` are declared by somebody else.
        may_declare: Whether ``rabbitdelay_declare`` is "auto".
        modules: The modules that a worker serves.
        celerys_own: The names that Celery uses for itself.
    """
    everything = rf"{re.escape(topology.prefix)}\..*"
    prefixes = [re.escape(each.name_prefix) for each in (topology, *topology.former)]
    shared = [queue for queue in queues if not isinstance(queue, Broadcast)]
    match role:
        case "producer" if may_declare:
            yield from _all_of(everything, "declare the levels and send into them")
            yield from _to_declare(shared)
            yield from _to_bind(shared)
            broadcasts = [queue for queue in queues if isinstance(queue, Broadcast)]
            if broadcasts:
                pattern = _either(_exchanges(broadcasts))
                yield Right("configure", pattern, "declare the exchanges of broadcasts")
            yield from _to_get_replies(celerys_own)
        case "producer":
            for prefix in prefixes:
                yield Right("write", rf"{prefix}\.[^.]+\.x[0-9]+", "send into the levels")
                yield Right("write", rf"{prefix}\.delivery", "send tasks that are due at once")
            yield from _to_get_replies(celerys_own)
        case "worker":
            yield from _rights_of_worker(topology, queues, may_declare, modules)
            yield from _all_of(celerys_own.pattern, "Celery's remote control and events")
        case "check-in":
            for prefix in prefixes:
                yield Right("write", rf"{prefix}\.checkin", "hand in messages")
        case "operator":
            yield from _all_of(everything, "declare, look at and move what waits")
            yield from _to_declare(shared)
            yield from _to_bind(shared)
            yield from _all_of(r"amq\.gen.*", "compare the clocks (verify)")
            yield Right("write", r"amq\.default", "redrive messages, compare the clocks")


def _rights_of_worker(
    topology: Topology, queues: Sequence[Queue], may_declare: bool, modules: Sequence[str]
) -> Iterator[Right]:
    prefix = re.escape(topology.prefix)
    names, sources = "|".join(map(_name, queues)), _either(_exchanges(queues))
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
    yield from _to_declare(queues)
    if may_declare:
        yield from _to_bind(queues)


def topic_rights(topology: Topology, queues: Sequence[Queue]) -> Iterator[TopicRight]:
    r"""Yield the topic permissions of a producer that may delay tasks for some queues only.

    An exchange without a topic permission takes every key, so each of the levels has one, and each
    of former generations, to which the producer may write too. A key has as many digits as there
    are levels, because a key that matches no binding would reach distribution, which looks into the
    headers. The expressions end with ``\z``: ``$`` would also match before a line feed at the end
    of a key.

    Args:
        topology: The levels.
        queues: The queues.
    """
    shard = r"s[0-9]+\." if topology.shards > 1 else ""
    # A broadcast is reached through distribution alone.
    words = _either(
        encode_destination(queue.name) for queue in queues if not isinstance(queue, Broadcast)
    )
    pattern = rf"^{shard}([0-9]+\.){{{len(topology.layout.levels)}}}({words})\z"
    for each in (topology, *topology.former):
        for exchange in each.exchanges:
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


def _to_declare(queues: Sequence[Queue]) -> Iterator[Right]:
    """Yield what declares queues with their exchanges, and binds them.

    Where a queue names a dead-letter exchange, or an exchange an alternate one, the broker requires
    write permission on that when it is declared for the first time.
    """
    declared = [queue for queue in queues if not _is_declared_by_others(queue)]
    names = [*map(_name, declared), *map(re.escape, _exchanges(declared))]
    yield from _all_of("|".join(dict.fromkeys(names)), "declare the queues of the tasks")
    behind = [
        *((queue.queue_arguments or {}).get("x-dead-letter-exchange") for queue in declared),
        *((each.arguments or {}).get("alternate-exchange") for each in _sources(declared)),
    ]
    targets = _either(name or "amq.default" for name in behind if name is not None)
    if targets:
        yield Right("write", targets, "declare queues that dead-letter to it")


def _to_bind(queues: Sequence[Queue]) -> Iterator[Right]:
    """Yield what binds the queues that others declare to the levels."""
    names = _either(queue.name for queue in queues if _is_declared_by_others(queue))
    if names:
        yield Right("write", names, "bind the queues of the tasks to the levels")


def _to_get_replies(celerys_own: CelerysOwn) -> Iterator[Right]:
    if celerys_own.has_replies:
        yield Right("configure", _UUID, "declare the queue of the results")
        yield Right("read", _UUID, "get the results")


def _is_declared_by_others(queue: Queue) -> bool:
    return bool(getattr(queue, "no_declare", False))


def _name(queue: Queue) -> str:
    """Return the expression for a queue's name. Each worker has its own queue for a broadcast."""
    escaped = re.escape(queue.name)
    if not isinstance(queue, Broadcast):
        return escaped
    return re.sub(f"{_UUID}$", lambda _: _UUID, escaped.replace(r"\-", "-"))


def _sources(queues: Sequence[Queue]) -> list[Exchange]:
    sources = [
        source
        for queue in queues
        for source in (queue.exchange, *(binding.exchange for binding in queue.bindings))
    ]
    return [source for source in sources if source is not None and source.name]


def _exchanges(queues: Sequence[Queue]) -> list[str]:
    return [source.name for source in _sources(queues)]


def _either(names: Iterable[str]) -> str:
    return "|".join(dict.fromkeys(map(re.escape, names)))
