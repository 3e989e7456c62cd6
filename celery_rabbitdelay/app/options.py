"""Reject conflicting times and reserved options."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from celery_rabbitdelay.exceptions import InvalidDelayType, UnknownOption
from celery_rabbitdelay.levels.delay import Delay

__all__ = ["refuse_options_of_later_versions", "refuse_two_times"]

#: Celery drops an option that it does not know in silence. A user who gives one of these relies on
#: it, so it is an error instead, with a delay and without one.
OPTIONS_OF_LATER_VERSIONS: Final = ("key", "job")


def refuse_options_of_later_versions(options: Mapping[str, Any]) -> None:
    """Refuse options that this version does not know yet.

    A stamp of such a name is not an option: Celery passes stamps among the options, and lists
    their names.

    Args:
        options: What ``apply_async`` takes.

    Raises:
        UnknownOption: One of them is given.
    """
    stamps = options.get("stamped_headers") or ()
    for name in OPTIONS_OF_LATER_VERSIONS:
        if options.get(name) is not None and name not in stamps:
            raise UnknownOption(name, options[name])


def refuse_two_times(delay: Delay, countdown: float | None, eta: datetime | str | None) -> None:
    """Refuse a delay together with a countdown or an eta.

    Raises:
        InvalidDelayType: Both were given.
    """
    for name, value in (("countdown", countdown), ("eta", eta)):
        if value is not None:
            raise InvalidDelayType(delay, f"cannot be combined with {name} = {value!r}")
