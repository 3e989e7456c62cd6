"""A producer and a worker in one process, since a broker in memory is seen by no other.

A program of its own, because Celery's worker for tests changes the logging of its process. Its
argument is the delay in seconds; it prints as JSON when a task was sent and what the task saw.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from celery.contrib.testing.worker import start_worker

from tests.integration.shop import PATIENCE, make_app


def main() -> None:
    """Send tasks and wait for them."""
    app: Any = make_app(
        {"prefix": "shop", "broker_url": "memory://", "result_backend": "cache+memory://"}
    )
    with start_worker(app, pool="solo", loglevel="INFO", perform_ping_check=False):
        sent_at = time.time()
        delay = float(sys.argv[1])
        results = [app.tasks["look"].apply_async(delay=delay) for _ in range(2)]
        seen = [result.get(timeout=PATIENCE) for result in results]
        print(json.dumps({"sent_at": sent_at, "seen": seen}))  # noqa: T201


if __name__ == "__main__":
    main()
