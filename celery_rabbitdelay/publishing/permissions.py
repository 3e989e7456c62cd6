"""Why RabbitMQ refuses a method: the permission that a user lacks, or a limit that is reached.

RabbitMQ checks a permission for each resource that a method touches
(https://www.rabbitmq.com/docs/access-control#authorisation). See :data:`.PASSIVE_PERMISSION`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from amqp import spec
from amqp.exceptions import AccessRefused, AMQPError

from celery_rabbitdelay.exceptions import MissingPermission, PermissionMissing

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


def missing_permission(refused: BaseException) -> MissingPermission | None:
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
    return MissingPermission(
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


def is_limit_reached(refused: BaseException) -> bool:
    """Return whether the broker has refused a method because a limit is reached."""
    return isinstance(refused, AMQPError) and _LIMIT.search(str(refused.reply_text)) is not None


def reason_of(refused: BaseException) -> str:
    """Return why the broker has refused a method, with the way out as far as it is known."""
    permission = missing_permission(refused)
    if permission is not None:
        return str(permission)
    return f"{refused}: {_RAISE_LIMIT}" if is_limit_reached(refused) else str(refused)


@contextmanager
def permissions_named() -> Iterator[None]:
    """Raise :class:`.PermissionMissing` where the broker refuses a method for a permission."""
    try:
        yield
    except AccessRefused as refused:
        permission = missing_permission(refused)
        if permission is None:
            raise
        raise PermissionMissing(permission) from refused
