"""``verify`` for the broker, the workers and the schedules of an application."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from amqp.exceptions import ChannelError
from kombu import Connection

from celery_rabbitdelay.app.control import status_of_workers
from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.operations.verify.checks import verify
from celery_rabbitdelay.operations.verify.findings import Verification
from celery_rabbitdelay.operations.verify.management import management_api
from celery_rabbitdelay.schedules.record import Records

#: Seconds to wait for the workers' answers.
WORKERS_TIMEOUT: Final = 1.0


def verify_application(
    delays: RabbitDelay, connection: Connection, management: str | None = None
) -> Verification:
    """Look at the broker of an application, and change nothing.

    Args:
        delays: The application's delays.
        connection: The broker that tasks are sent to.
        management: The URL of its management API; None: at the broker's host.

    Raises:
        InvalidManagementURL: It is not such a URL.
        ManagementUnavailable: The management API does not answer, or the user may not read all.
        OSError: The broker cannot be reached, or does not answer.
    """
    reached = management_api(connection, management)
    workers: Mapping[str, Mapping[str, Any]] = {}
    is_blocked = delays.is_blocked()
    if not is_blocked:  # the workers are asked by messages
        # verify's user may not have the rights for remote control, or a queue for the answers is
        # one too many.
        with suppress(ChannelError):
            workers = status_of_workers(delays.app, connection, WORKERS_TIMEOUT)
    queues = delays.app.amqp.queues.values()
    schedules = Records(delays.registry) if delays.has_registry else None
    return verify(
        connection,
        delays.settings,
        queues,
        reached,
        workers=None if is_blocked else workers,
        schedules=schedules,
        is_blocked=is_blocked,
    )
