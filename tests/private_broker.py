"""The RabbitMQ of a program at the terminal, such as a benchmark."""

import os
from pathlib import Path
from typing import Final

from celery_rabbitdelay.testing import RabbitMQServer
from tests.rabbitmq_node import RabbitMQNode

#: Lines for ``rabbitmq.conf``: hundreds of queues need not tell of each election.
QUIET: Final = ("log.queue.level = error", "log.ra.level = error")


def private_broker(management: bool = False) -> RabbitMQServer:
    """A RabbitMQ of our own, not started: that of ``RABBITDELAY_BROKER_ROOT``, if there is one.

    Args:
        management: Whether it has its management API.
    """
    root = os.environ.get("RABBITDELAY_BROKER_ROOT")
    # It wins over every broker that an application names.
    os.environ.pop("CELERY_BROKER_URL", None)
    return RabbitMQNode(Path(root) if root else None, settings=QUIET, management=management)
