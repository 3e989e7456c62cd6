"""The options of a task that a later version takes, refused until then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from celery_rabbitdelay.exceptions import UnknownOption

__all__ = ["refuse_options_of_later_versions"]

#: Celery drops an option that it does not know in silence. A user who gives one of these relies on
#: it, so it is an error instead, with a delay and without one.
OPTIONS_OF_LATER_VERSIONS: Final = ("key", "job")


def refuse_options_of_later_versions(options: Mapping[str, Any]) -> None:
    """Refuse options that this version does not know yet.

    A stamp of such a name is no option of ours: Celery passes stamps among the options, and lists
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
