"""Which messages only a later version of this package can read. Pure.

Messages wait for years, and the workers of a fleet may be of two versions. A message says by its
header ``rabbitdelay-version``, an integer, which version of the messages' format it needs; without
the header, 1. Only a version that needs another number writes the header. An envelope says its
version by its content type.

A message of a later version goes back into the levels, unopened, until a worker of that version
receives it; see :meth:`.Redelivery.until_upgraded`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from celery_rabbitdelay.exceptions import LaterVersion
from celery_rabbitdelay.modules import headers as module_headers
from celery_rabbitdelay.modules.envelope import CONTENT_TYPE
from celery_rabbitdelay.publishing.message import shortened

#: The latest version of the messages' format that this version of the package reads. Raise it when
#: an older worker would do the wrong thing with a message; see docs/explanation/versions.md.
MESSAGE_VERSION: Final = 1

#: The content types of all that this package has ever made, or will make, begin with this.
OWN_CONTENT_TYPES: Final = "application/vnd.rabbitdelay."

#: Seconds between two warnings on one connection.
WARN_EVERY: Final = 3600.0


def later_version(headers: Mapping[str, Any], content_type: object) -> str | None:
    """Return why this version of the package cannot read a message; None if it can.

    A value of the header that no version writes counts as later too: nothing is opened by guess.

    Args:
        headers: The message's headers; anybody may have written them.
        content_type: Its property ``content_type``.
    """
    version = headers.get(module_headers.VERSION, MESSAGE_VERSION)
    is_number = isinstance(version, int) and not isinstance(version, bool)
    if not is_number or not 1 <= version <= MESSAGE_VERSION:
        return (
            f"it needs a later version of celery_rabbitdelay: its header {module_headers.VERSION} "
            f"is {shortened(version)}, and this version reads messages up to {MESSAGE_VERSION}"
        )
    is_own = isinstance(content_type, str) and content_type.startswith(OWN_CONTENT_TYPES)
    if is_own and content_type != CONTENT_TYPE:
        return (
            "it needs a later version of celery_rabbitdelay: its content type is "
            f"{shortened(content_type)}, and this version opens {CONTENT_TYPE!r}"
        )
    return None


def refuse_later_version(headers: Mapping[str, Any], content_type: object) -> None:
    """Refuse a message that only a later version can read.

    Raises:
        LaterVersion: It is one.
    """
    why = later_version(headers, content_type)
    if why is not None:
        raise LaterVersion(why)


class LaterVersionWarning:
    """Warns about messages of a later version: once an hour, and not for each message.

    Args:
        logger: Where to.
        clock: Returns seconds, as :func:`time.monotonic`.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._warned_at: float | None = None

    def warn(self, what: str, why: str) -> None:
        """Log that a message goes back into the levels, unless that was logged within the hour.

        Args:
            what: The message, and who has received it.
            why: What :func:`later_version` has returned.
        """
        now = self._clock()
        if self._warned_at is not None and now - self._warned_at < WARN_EVERY:
            self._logger.debug("%s goes back into the delay levels: %s.", what, why)
            return
        self._warned_at = now
        self._logger.warning(
            "%s goes back into the delay levels, unopened: %s. A worker of the later version takes "
            "it from there; without one, it is undeliverable after rabbitdelay_retry_for. Upgrade "
            "celery_rabbitdelay on all workers. Others go back without a word for an hour.",
            what,
            why,
        )
