"""Why RabbitMQ refuses a method: other levels are declared, a permission is lacking, or a limit.

RabbitMQ checks a permission for each resource that a method touches
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

#: What the broker says; see :data:`.UNNAMED_PERMISSION`.
_REPLY: Final = re.compile(
    r"(?:(?P<permission>configure|write|read) )?access to (?P<kind>queue|exchange|topic) "
    r"'(?P<name>.*?)' (?:in exchange '(?P<exchange>.*?)' )?in vhost '(?P<vhost>.*?)' "
    r"refused for user '(?P<user>.*)'",
    re.DOTALL,
)

#: What a method needs on a queue or an exchange, where the broker does not say it. For a new queue
#: or exchange, it needs permission to read it and to write to its dead-letter or alternate
#: exchange.
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
    """Return the permission for lack of which the broker has refused a method.

    Returns:
        None if the broker has refused it for another reason, or its reply, of at most 255 bytes, is
        cut off before the user's name.
    """
    if not isinstance(refused, AccessRefused):
        return None
    reply = str(refused.reply_text)
    said = _REPLY.search(reply)
    if said is None:
        return None
    kind, is_topic = said["kind"], said["kind"] == "topic"
    method = refused.method_sig or (0, 0)
    needed = said["permission"] or _NEEDED.get((method, kind), "configure, write or read")
    return exceptions.MissingPermission(
        user=said["user"],
        permission=needed,
        kind="exchange" if is_topic else kind,
        name=said["exchange"] if is_topic else said["name"],
        virtual_host=said["vhost"],
        topic=said["name"] if is_topic else None,
    )


#: What the broker says of its limits: of queues, exchanges, connections and channels, by virtual
#: host, user, node and cluster.
_LIMIT: Final = re.compile(r"\blimit .*is reached|has reached the maximum allowed .*\blimit")

#: The way out.
_RAISE_LIMIT: Final = (
    "raise that limit with rabbitmqctl set_vhost_limits or set_user_limits, or in rabbitmq.conf; "
    "the queues that exist are in order"
)


def reason_of(refused: BaseException) -> str:
    """Return why the broker has refused a method, with the way out as far as it is known."""
    reason = str(missing_permission(refused) or refused) or repr(refused)
    return f"{reason}: {_RAISE_LIMIT}" if _LIMIT.search(reason) else reason


def error_of(
    refused: BaseException,
    address: tuple[str, str],
    kind: Callable[[str, str, str], exceptions.PublishError],
    not_permitted: Callable[[exceptions.MissingPermission, str, str, str], exceptions.PublishError],
) -> exceptions.PublishError:
    """Return the error of a message for which the broker has refused a method.

    Args:
        refused: What the broker said.
        address: The message's exchange and routing key.
        kind: The error's class.
        not_permitted: Its class if a permission is lacking.
    """
    permission = missing_permission(refused)
    if permission is not None:
        return not_permitted(permission, *address, str(permission))
    return kind(*address, reason_of(refused))


@contextmanager
def permissions_named() -> Iterator[None]:
    """Raise :class:`.PermissionMissing` where the broker refuses a method for a permission."""
    try:
        yield
    except AccessRefused as refused:
        permission = missing_permission(refused)
        if permission is None:
            raise
        raise exceptions.PermissionMissing(permission) from refused


#: What RabbitMQ says if something exists with other arguments. It closes the channel with the same
#: code for other reasons, such as a limit of the virtual host.
INEQUIVALENT: Final = "inequivalent arg"


@contextmanager
def conflict_explained(topology: Topology) -> Iterator[None]:
    """Raise :class:`.LayoutConflict` where the broker has something with other arguments."""
    try:
        yield
    except PreconditionFailed as conflict:
        if INEQUIVALENT not in str(conflict):
            raise
        raise conflict_with(topology, str(conflict)) from conflict


def conflict_with(topology: Topology, reply: str) -> exceptions.LayoutConflict:
    """Return the error for a refusal, with advice that fits it.

    Args:
        topology: The topology that was to be declared.
        reply: What the broker answered.
    """
    # The broker cuts its answer off, which may end within the name.
    named, guard = reply.partition("for exchange '")[2], f"{topology.identity.guard.name}'"
    if not named or named[: len(guard)] != guard[: len(named)]:
        advice = (
            "somebody has declared an exchange or a queue with other arguments. Delete it once it "
            "is empty, and declare the levels again; `celery rabbitdelay verify` lists all that "
            "differ"
        )
        return exceptions.LayoutConflict(topology.prefix, reply, advice)
    advice = (
        "the levels there have another rabbitdelay_layout, rabbitdelay_tick, "
        "rabbitdelay_queue_type or rabbitdelay_shards, or are of another version, as the names "
        "that follow say. Restore what they were declared with; or use another "
        "rabbitdelay_prefix, and move what waits with `celery rabbitdelay migrate`; or delete "
        "them once they are empty: `celery rabbitdelay delete`, or celery_rabbitdelay.kombu.delete"
    )
    return exceptions.LayoutConflict(topology.prefix, reply, advice)
