"""Which policy is in effect for a queue, as RabbitMQ determines it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from celery_rabbitdelay.operations.verify.inventory import FoundQueue, Inventory, Policy

#: Keys of which a policy and an operator policy both hold, so that the smaller value counts:
#: https://www.rabbitmq.com/docs/policies#operator-policies. Of all others, the operator's counts.
SMALLER_COUNTS: Final = frozenset(
    {"delivery-limit", "expires", "max-length", "max-length-bytes", "message-ttl"}
)


class EffectivePolicy(NamedTuple):
    """What the policies come to for a queue.

    Attributes:
        definition: The keys and values.
        sources: The policy that each key comes from; without a policy where only the sum is known.
    """

    definition: Mapping[str, Any]
    sources: Mapping[str, Policy]


def effective_policies(inventory: Inventory, queue: FoundQueue) -> tuple[EffectivePolicy, ...]:
    """Return what policies and operator policies come to for a queue.

    There are several if several policies of the highest priority match: RabbitMQ takes any of them.
    They are computed from the policies, because RabbitMQ reports what is in effect some seconds
    late.
    """
    if inventory.policies is None:
        definition = (inventory.effective or {}).get(queue.name, {})
        return (EffectivePolicy(definition, {}),)
    matching = [policy for policy in inventory.policies if _matches(policy, queue)]
    return tuple(
        _merged(policy, operator)
        for policy in _highest(each for each in matching if not each.is_operator)
        for operator in _highest(each for each in matching if each.is_operator)
    )


def _matches(policy: Policy, queue: FoundQueue) -> bool:
    if policy.apply_to not in ("all", "queues", f"{queue.type}_queues"):
        return False
    try:
        return re.search(policy.pattern, queue.name) is not None
    except re.error:
        # Erlang knows expressions that Python does not know; it is better to look in vain.
        return True


def _highest(policies: Iterable[Policy]) -> list[Policy | None]:
    policies = list(policies)
    highest = max((policy.priority for policy in policies), default=0)
    return [policy for policy in policies if policy.priority == highest] or [None]


def _merged(policy: Policy | None, operator: Policy | None) -> EffectivePolicy:
    definition: dict[str, Any] = {}
    sources: dict[str, Policy] = {}
    for each in filter(None, (policy, operator)):
        for key, value in each.definition.items():
            if key in definition and key in SMALLER_COUNTS and definition[key] <= value:
                continue
            definition[key] = value
            sources[key] = each
    return EffectivePolicy(definition, sources)
