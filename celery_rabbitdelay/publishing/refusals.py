"""Why RabbitMQ refuses a method: different arguments, a missing permission, or a limit.

RabbitMQ checks a permission for every resource that a method touches
(https://www.rabbitmq.com/docs/access-control#authorisation). See :data:`.PASSIVE_PERMISSION`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from amqp import spec
from amqp.exceptions import AccessRefused, PreconditionFailed

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.levels.topology import Topology

#: The broker's reply if a permission is missing; see :data:`.UNNAMED_PERMISSION`.
_REPLY: Final = re.compile(
    r"(?:(?P<permission>configure|write|read) )?access to (?P<kind>queue|exchange|topic) "
    r"'(?P<name>.*?)' (?:in exchange '(?P<exchange>.*?)' )?in vhost '(?P<vhost>.*?)' "
    r"refused for user '(?P<user>.*)'",
    re.DOTALL,
)

#: The permission that a method needs on a queue or an exchange, for brokers whose reply does not
#: name the permission. To declare a new queue or exchange, a user also needs read permission on it
#: and write permission on its dead-letter or alternate exchange.
_NEEDED: Final[Mapping[tuple[tuple[int, int], str], str]] = {
    (spec.Exchange.Declare, "exchange"): "configure, read or write",
    (spec.Queue.Declare, "queue"): "configure or read",
    (spec.Queue.Declare, "exchange"): "write",
    (spec.Queue.Bind, "queue"): "write",
    (spec.Queue.Bind, "exchange"): "read",
    (spec.Queue.Bind, "topic"): "read",
    (spec.Exchange.Bind, "exchange"): "write or read",
    (spec.Exchange.Delete, "exchange"): "configure",
    (spec.Queue.Delete, "queue"): "configure",
    (spec.Queue.Purge, "queue"): "read",
    (spec.Basic.Consume, "queue"): "read",
    (spec.Basic.Get, "queue"): "read",
    (spec.Basic.Publish, "exchange"): "write",
    (spec.Basic.Publish, "topic"): "write",
}


def missing_permission(refused: BaseException) -> exceptions.MissingPermission | None:
    """Return the permission whose absence made the broker refuse a method.

    Returns:
        The permission. None if the broker has refused the method for another reason, or if its
        reply, of at most 255 bytes, is cut off before the user's name.
    """
    if not isinstance(refused, AccessRefused):
        return None
    reply = str(refused.reply_text)
    found = _REPLY.search(reply)
    if found is None:
        return None
    kind, is_topic = found["kind"], found["kind"] == "topic"
    method = refused.method_sig or (0, 0)
    needed = found["permission"] or _NEEDED.get((method, kind), "configure, write or read")
    return exceptions.MissingPermission(
        user=found["user"],
        permission=needed,
        kind="exchange" if is_topic else kind,
        name=found["exchange"] if is_topic else found["name"],
        virtual_host=found["vhost"],
        topic=found["name"] if is_topic else None,
    )


#: The broker's replies at its limits: of queues, exchanges, connections and channels, by virtual
#: host, user, node and cluster.
_LIMIT: Final = re.compile(r"\blimit .*is reached|has reached the maximum allowed .*\blimit")

_RAISE_LIMIT: Final = (
    "raise this limit with rabbitmqctl set_vhost_limits or set_user_limits, or in rabbitmq.conf; "
    "existing queues are not affected"
)


def reason_of(refused: BaseException) -> str:
    """Return why the broker has refused a method, and what to do if that is known."""
    reason = str(missing_permission(refused) or refused) or repr(refused)
    return f"{reason}: {_RAISE_LIMIT}" if _LIMIT.search(reason) else reason


def error_of(
    refused: BaseException,
    address: tuple[str, str],
    kind: Callable[[str, str, str], exceptions.PublishError],
    not_permitted: Callable[[exceptions.MissingPermission, str, str, str], exceptions.PublishError],
) -> exceptions.PublishError:
    """Return the error of a message for which the broker refused a method.

    Args:
        refused: The broker's error.
        address: The message's exchange and routing key.
        kind: The error's class.
        not_permitted: The error's class if a permission is missing.
    """
    permission = missing_permission(refused)
    if permission is not None:
        return not_permitted(permission, *address, str(permission))
    return kind(*address, reason_of(refused))


@contextmanager
def permissions_named() -> Iterator[None]:
    """Raise :class:`.PermissionMissing` if the broker refuses a method for lack of a permission."""
    try:
        yield
    except AccessRefused as refused:
        permission = missing_permission(refused)
        if permission is None:
            raise
        raise exceptions.PermissionMissing(permission) from refused


#: RabbitMQ's reply if an entity exists with other arguments. The reply's code is not enough:
#: RabbitMQ sends the same code for other reasons, such as a limit of the virtual host.
INEQUIVALENT: Final = "inequivalent arg"


@contextmanager
def conflict_explained(topology: Topology) -> Iterator[None]:
    """Raise :class:`.LayoutConflict` if an exchange or queue exists with different arguments."""
    try:
        yield
    except PreconditionFailed as conflict:
        if INEQUIVALENT not in str(conflict):
            raise
        raise conflict_with(topology, str(conflict)) from conflict


def conflict_with(topology: Topology, reply: str) -> exceptions.LayoutConflict:
    """Return the error for a refused declaration, with advice that fits the broker's reply.

    Args:
        topology: The topology that could not be declared.
        reply: The broker's reply.
    """
    # The broker truncates its reply, perhaps within the name.
    named, guard = reply.partition("for exchange '")[2], f"{topology.identity.guard.name}'"
    if not named or named[: len(guard)] != guard[: len(named)]:
        advice = (
            "an exchange or a queue exists with other arguments. Delete it once it is empty, and "
            "declare the delay levels again; `celery rabbitdelay verify` lists all differences"
        )
        return exceptions.LayoutConflict(topology.prefix, reply, advice)
    advice = (
        "they were declared with another rabbitdelay_layout, rabbitdelay_tick, "
        "rabbitdelay_queue_type or rabbitdelay_shards, or by another version; the names in the "
        "reply show which. Restore the former settings; or use another rabbitdelay_prefix, and "
        "move the waiting messages with `celery rabbitdelay migrate`; or delete the old levels "
        "once they are empty: `celery rabbitdelay delete`, or celery_rabbitdelay.kombu.delete"
    )
    return exceptions.LayoutConflict(topology.prefix, reply, advice)
