"""The page Health: what verify finds, each with its way out."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, get_args

from celery_rabbitdelay.operations.verify.findings import Severity
from celery_rabbitdelay.web.asked import Asked

#: What the findings need.
NEEDS: Final = (
    "The findings need the management API: rabbitmq-plugins enable rabbitmq_management, and a user "
    "with the tag 'monitoring'. If it is not on the broker's host or has another user, name it in "
    "the option 'management', or with --management"
)


def health(asked: Asked) -> dict[str, Any]:
    """Return what on the broker loses tasks, or makes them early or late."""
    reading = asked.site.findings.latest()
    found = reading.value
    number = Counter(each.severity for each in found.findings) if found is not None else None
    return {
        "taken": reading.taken,
        "error": reading.error,
        "needs": NEEDS,
        "version": None if found is None else found.version,
        "counts": None
        if number is None
        else {severity: number[severity] for severity in get_args(Severity)},
        "findings": [each._asdict() for each in found.findings] if found is not None else [],
    }
