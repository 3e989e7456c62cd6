"""The broker's version, feature flags and deprecated features."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from celery_rabbitdelay.operations.verify.finding import Finding
from celery_rabbitdelay.operations.verify.inventory import Inventory

#: The oldest series that the tests run on.
OLDEST: Final = (3, 10, 0)

#: Up to this version of the series 4.3, at-least-once dead-lettering stops when the replicas of a
#: queue change: https://github.com/rabbitmq/rabbitmq-server/pull/16652
STUCK_DEAD_LETTERING: Final = ((4, 3, 0), (4, 3, 2))

#: Before RabbitMQ 3.11, at-least-once dead-lettering needs this feature flag:
#: https://www.rabbitmq.com/docs/quorum-queues#activating-at-least-once-dead-lettering
NEEDED_FLAG: Final = "stream_queue"


def check_version(version: str) -> Iterator[Finding]:
    """Find a version that is too old, or has a fault that concerns the levels."""
    number = tuple(map(int, re.findall(r"\d+", version)[:3]))
    if number < OLDEST:
        yield Finding(
            "danger",
            "version-too-old",
            (f"RabbitMQ {version}",),
            "quorum queues of this version have no TTL, or dead-letter at most once",
            "the levels cannot be declared, or lose tasks",
            "upgrade to RabbitMQ 3.10 or later",
        )
    if STUCK_DEAD_LETTERING[0] <= number <= STUCK_DEAD_LETTERING[1]:
        yield Finding(
            "warning",
            "version-fault",
            (f"RabbitMQ {version}",),
            "dead-lettering of quorum queues stops when their replicas change (rabbitmq-server "
            "#16652)",
            "after a node was added or removed, tasks may stand still",
            "upgrade to RabbitMQ 4.3.3 or later",
        )


def check_features(inventory: Inventory) -> Iterator[Finding]:
    """Find disabled feature flags, and deprecated features that are in use."""
    for flag in inventory.disabled_flags or ():
        if flag == NEEDED_FLAG:
            yield Finding(
                "danger",
                "feature-flag-disabled",
                (f"feature flag {flag}",),
                "the feature flag is disabled",
                "RabbitMQ dead-letters at most once, with only a line in its log: tasks on their "
                "way to the next level are lost if a node fails",
                f"rabbitmqctl enable_feature_flag {flag}, then restart the nodes one by one",
            )
        else:
            yield Finding(
                "warning",
                "feature-flag-disabled",
                (f"feature flag {flag}",),
                "the feature flag is disabled",
                "the broker cannot be upgraded to a version that requires it",
                "rabbitmqctl enable_feature_flag all, once all nodes have this version",
            )
    for feature in inventory.deprecated or ():
        yield Finding(
            "note",
            "deprecated-feature",
            (f"deprecated feature {feature}",),
            "a deprecated feature is in use, by this application or another one",
            "whoever uses it fails after an upgrade to a version that has removed it",
            "see https://www.rabbitmq.com/docs/deprecated-features",
        )
