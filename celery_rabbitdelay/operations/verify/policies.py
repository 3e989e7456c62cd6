"""Policies and operator policies that break a promise."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from celery_rabbitdelay.operations.verify.effective_policy import effective_policies
from celery_rabbitdelay.operations.verify.finding import Finding, Severity
from celery_rabbitdelay.operations.verify.inventory import FoundQueue, Inventory, Policy

#: What a queue is for: ``level`` (a digit, or meditation: messages wait for their TTL), ``module``
#: (check-in and distribution), ``undeliverable``, ``destination``.
Role: TypeAlias = Literal["level", "module", "undeliverable", "destination"]

#: The policy that the documentation recommends for the levels: it keeps other policies away.
GUARD: Final = json.dumps({"overflow": "reject-publish"})

#: Its priority.
GUARD_PRIORITY: Final = 1000


class _Harm(NamedTuple):
    """What one key of a policy does to a queue."""

    severity: Severity
    code: str
    key: str
    consequence: str


def check_policies(
    inventory: Inventory, roles: Mapping[str, Role], prefix: str, virtual_host: str
) -> Iterator[Finding]:
    """Find policies that lose tasks, or make them early or late.

    Bounds on destinations are checked by ``destinations``.

    Args:
        inventory: The broker's queues and policies.
        roles: What the queues are for, by their names.
        prefix: The prefix of the topology.
        virtual_host: The virtual host.
    """
    for name, role in roles.items():
        queue = inventory.queues.get(name)
        if queue is None:
            continue
        for effective in effective_policies(inventory, queue):
            for harm in _harms(role, queue, effective.definition):
                source = effective.sources.get(harm.key)
                yield Finding(
                    harm.severity,
                    harm.code,
                    (f"queue {name}",),
                    f"{_title(source)} sets {harm.key} to {effective.definition[harm.key]!r}",
                    harm.consequence,
                    _remedy(source, role, prefix, virtual_host),
                )


def _harms(role: Role, queue: FoundQueue, definition: Mapping[str, Any]) -> Iterator[_Harm]:
    if role == "destination":
        yield from _harms_to_destination(queue, definition)
        return
    yield from _expiry(role, queue, definition)
    yield from _bounds(role, definition)
    is_quorum = queue.type == "quorum"
    # The policy's overflow counts, not the argument's; of dead-lettering, the argument's counts
    # wherever there is one (rabbit_quorum_queue:args_policy_lookup).
    if "x-dead-letter-exchange" in queue.arguments:
        if is_quorum and definition.get("overflow", "reject-publish") != "reject-publish":
            yield _Harm(
                "danger",
                "policy-overflow",
                "overflow",
                "RabbitMQ then dead-letters at most once: a message on its way to the next queue "
                "is lost if that queue or its node is away",
            )
        if "dead-letter-routing-key" in definition:
            yield _Harm(
                "danger",
                "policy-dead-letter",
                "dead-letter-routing-key",
                "a message loses the routing key that leads it to its queue, and goes to "
                "undeliverable",
            )
    limit = definition.get("delivery-limit")
    if is_quorum and limit is not None and 0 <= limit < queue.arguments.get("x-delivery-limit", 0):
        if role == "undeliverable":
            consequence = f"a message that was looked at {limit} times is dropped"
            yield _Harm("danger", "policy-delivery-limit", "delivery-limit", consequence)
        elif role == "module":
            consequence = (
                f"a message goes to undeliverable after {limit} failed workers, whatever the cause"
            )
            yield _Harm("warning", "policy-delivery-limit", "delivery-limit", consequence)


def _expiry(role: Role, queue: FoundQueue, definition: Mapping[str, Any]) -> Iterator[_Harm]:
    if "expires" in definition:
        yield _Harm(
            "danger",
            "policy-expires",
            "expires",
            "RabbitMQ deletes the queue with all messages in it once it has had no consumer for "
            "that long; declaring it again does not prevent that",
        )
    ttl = definition.get("message-ttl")
    own = queue.arguments.get("x-message-ttl")
    if ttl is None or (own is not None and ttl >= own):
        return
    consequences = {
        "level": "tasks leave the level before their time; workers put them back again and again",
        "module": "messages go to undeliverable if no worker takes them for that long",
        "undeliverable": "undeliverable messages are dropped after that time",
    }
    yield _Harm("danger", "policy-message-ttl", "message-ttl", consequences[role])


def _bounds(role: Role, definition: Mapping[str, Any]) -> Iterator[_Harm]:
    consequences = {
        "level": "a full queue refuses tasks: sending fails, and the level before it stalls",
        "module": "a full queue refuses messages: check-in fails, and the last level stalls",
        "undeliverable": "a full queue drops or refuses messages: undeliverable ones are lost, or "
        "stall the levels",
    }
    for key in ("max-length", "max-length-bytes"):
        if key in definition:
            yield _Harm("danger", "policy-max-length", key, consequences[role])


def _harms_to_destination(queue: FoundQueue, definition: Mapping[str, Any]) -> Iterator[_Harm]:
    if "expires" in definition:
        yield _Harm(
            "warning",
            "policy-expires",
            "expires",
            "RabbitMQ deletes the queue with all tasks in it once no worker has consumed from it "
            "for that long",
        )
    goes = "are dropped"
    if definition.get("dead-letter-exchange") or queue.arguments.get("x-dead-letter-exchange"):
        goes = "leave the queue for its dead-letter exchange"
    if definition.get("message-ttl", "") != "":
        consequence = f"due tasks {goes} if no worker takes them for that long"
        yield _Harm("warning", "policy-message-ttl", "message-ttl", consequence)
    if definition.get("delivery-limit", -1) >= 0 and queue.type == "quorum":
        limit = definition["delivery-limit"]
        consequence = f"tasks {goes} once they were redelivered more than {limit} times"
        yield _Harm("warning", "policy-delivery-limit", "delivery-limit", consequence)


def _title(policy: Policy | None) -> str:
    if policy is None:
        return "a policy or an operator policy"
    kind = "operator policy" if policy.is_operator else "policy"
    return f"the {kind} '{policy.name}' for '{policy.pattern}', priority {policy.priority},"


def _remedy(policy: Policy | None, role: Role, prefix: str, virtual_host: str) -> str:
    if role == "destination":
        return "leave the key out, or narrow the policy's pattern, if tasks must not be lost there"
    if policy is not None and policy.is_operator:
        return (
            "change the operator policy's pattern so that it does not match the queues that begin "
            f"with {prefix + '.'!r}; a policy of their own does not keep it away"
        )
    priority = max(GUARD_PRIORITY, 0 if policy is None else policy.priority + 1)
    words = ("-p", virtual_host, "--priority", str(priority), "--apply-to", "queues", prefix)
    pattern = f"^{re.escape(prefix)}\\."
    return (
        "rabbitmqctl set_policy " + shlex.join([*words, pattern, GUARD]) + "; an operator policy "
        "has to leave these queues out by its pattern"
    )
