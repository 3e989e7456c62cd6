"""The page Health: what verify finds, each with its way out."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, get_args

from celery_rabbitdelay.operations.findings import Severity, blocked
from celery_rabbitdelay.web.asked import Asked

#: What the findings need.
NEEDS: Final = (
    "The findings need the management API: rabbitmq-plugins enable rabbitmq_management, and a user "
    "with the tag 'monitoring'. If it is not on the broker's host or has another user, name it in "
    "the option 'management', or with --management"
)


def health(asked: Asked) -> dict[str, Any]:
    """Return what on the broker loses tasks, or makes them early or late."""
    reading, glance = asked.site.findings.latest(), asked.site.glance.latest().value
    told = {"taken": reading.taken, "error": reading.error, "needs": NEEDS}
    found = () if reading.value is None else reading.value.findings
    # That publishers are blocked is known at once, and without the management API.
    alarms = [each for each in found if each.code == blocked().code]
    if glance is not None:
        alarms = (alarms or [blocked()]) if glance.status.is_blocked else []
    findings = [*alarms, *(each for each in found if each.code != blocked().code)]
    number = Counter(each.severity for each in findings)
    return {
        **told,
        "version": None if reading.value is None else reading.value.version,
        "counts": {severity: number[severity] for severity in get_args(Severity)},
        "findings": [each._asdict() for each in findings],
    }
