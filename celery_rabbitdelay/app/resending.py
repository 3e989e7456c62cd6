"""How often and how fast a delayed task is sent again, by Celery's options for publishing.

Celery counts: three retries by default, and over within a second. Publishing into the levels has a
time instead, ``rabbitdelay_confirm_timeout``, so that the election of a queue's leader or a broker
that starts again is waited out. A number of retries counts only where somebody has given it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import celery
from celery.app.defaults import DEFAULTS

from celery_rabbitdelay.app.celery_internals import sends_a_callback
from celery_rabbitdelay.publishing.publication import BACKOFF, RESENDS


class Resending(NamedTuple):
    """Whether and how often a message is sent again, by the caller's options and the settings.

    Attributes:
        is_on: Whether a message is sent again at all: the option ``retry``, or the setting
            ``task_publish_retry``.
        is_counted: Whether somebody has given a number of retries: the caller in ``retry_policy``,
            or ``task_publish_retry_policy``, if it is not Celery's default.
    """

    is_on: bool
    is_counted: bool

    @classmethod
    def of(cls, app: celery.Celery, options: Mapping[str, Any]) -> Resending:
        """Return what the options of ``apply_async`` say.

        Args:
            app: The application.
            options: The options, as the caller has given them.
        """
        retry = options.get("retry")
        configured = app.conf.task_publish_retry_policy
        return cls(
            bool(app.conf.task_publish_retry if retry is None else retry),
            configured != DEFAULTS["task_publish_retry_policy"]
            or "max_retries" in (options.get("retry_policy") or {}),
        )

    def resends(self, retry: bool, policy: Mapping[str, Any]) -> int | None:
        """Return the maximum of resends; None for as many as the timeout allows.

        Args:
            retry: Whether Celery wants the message to be sent again.
            policy: Celery's retry policy: the setting, with what the caller has given.
        """
        if not retry:
            # Celery 5.7 counts the retries of a callback itself, and turns ours off.
            uses_the_time = self.is_on and not self.is_counted and sends_a_callback()
            return RESENDS if uses_the_time else 0
        resends: int | None = policy.get("max_retries") if self.is_counted else RESENDS
        return resends

    @staticmethod
    def backoff(policy: Mapping[str, Any]) -> tuple[float, float, float]:
        """Return the seconds before the first resend, the step and the maximum."""
        names = ("interval_start", "interval_step", "interval_max")
        given = [policy.get(name) for name in names]
        first, step, longest = (
            default if value is None else float(value)
            for value, default in zip(given, BACKOFF, strict=True)
        )
        return first, step, longest
