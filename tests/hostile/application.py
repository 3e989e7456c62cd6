"""The Celery application that is under attack, and its worker.

A worker is started with ``-A tests.hostile.application`` and gets its settings as JSON in the
environment variable ``HOSTILE``.
"""

import json
import os
import re
import time
from pathlib import Path
from typing import Any, Final

from kombu import Queue

from celery_rabbitdelay import Celery
from celery_rabbitdelay.levels.topology import CHECK_IN, DISTRIBUTE, PROBE
from tests.celery_process import CeleryProcess
from tests.hostile.kinds import ALLOWED, MAX_BODY, TASKS

#: How a message says which one it is.
MARK: Final = re.compile(r"#(\d{8})")

#: The tasks that strangers name.
HOSTILE: Final[dict[str, dict[str, Any]]] = {
    "hostile": {},
    "hostile-limited": {"rate_limit": "200/s"},
    "hostile-held": {"rabbitdelay": False},
}


def make_app(settings: dict[str, Any]) -> Celery:
    """Create the application.

    Args:
        settings: ``broker_url``, ``prefix``, and ``journal``: the file that each task that runs is
            noted in; ``pool``: the pool of the worker.
    """
    prefix = settings["prefix"]
    app = Celery("attacked", broker=settings["broker_url"], set_as_current=False)
    names = [f"{prefix}.{name}" for name in (TASKS, ALLOWED)]
    quorum = {"x-queue-type": "quorum"}
    app.conf.update(
        task_default_queue=names[0],
        task_queues=[Queue(name, routing_key=name, queue_arguments=quorum) for name in names],
        task_ignore_result=True,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        rabbitdelay_prefix=prefix,
        rabbitdelay_layout=[("seconds", 6, 1), ("ms", 10, 0.1)],
        rabbitdelay_retry_for=0,
        rabbitdelay_max_message_bytes=MAX_BODY,
    )

    def note(*line: Any) -> None:
        with Path(settings["journal"]).open("a") as journal:
            journal.write(json.dumps(line) + "\n")

    @app.task(name="honest", shared=False)
    def honest(way: str, due: float) -> None:
        note("honest", way, time.time() - due)

    def hostile(task: Any, *args: Any, **kwargs: Any) -> None:
        mark, *_ = MARK.findall(f"{args} {(task.request.properties or {}).get('message_id')}")
        note("hostile", int(mark))

    for name, options in HOSTILE.items():
        app.task(hostile, name=name, bind=True, shared=False, **options)
    return app


#: What a worker serves by default.
SERVED: Final = (CHECK_IN, DISTRIBUTE, PROBE)


class AttackedWorker(CeleryProcess):
    """``celery -A tests.hostile.application worker``, which consumes the tasks' queue."""

    module = "tests.hostile.application"
    variable = "HOSTILE"

    def _command(self) -> list[str]:
        queue, pool = f"{self._settings['prefix']}.{TASKS}", self._settings["pool"]
        # With a connection for events, Celery's loop of gevent takes ten messages a second at most.
        silent = f"-n attacked-{self.port}@localhost --without-gossip --without-heartbeat"
        return self.celery(f"worker -P {pool} -c 1 -l INFO -Q {queue} {silent}")

    def _ready(self) -> bool:
        return " ready." in self.log and self.log.count("serving the queue") == len(SERVED)


if "HOSTILE" in os.environ:
    app = make_app(json.loads(os.environ["HOSTILE"]))
