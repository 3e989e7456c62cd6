# ruff: noqa: T201  # a program tells its test what it has done
"""Programs that send a task or move it to earlier, and are killed at a step that a test names.

``python -m tests.registry.integration.registry_shop WHAT STEP``, with the application's settings in
the environment variable ``SHOP`` and what to do as JSON on the standard input. Before and after a
message is published, and before and after each call of the registry, a step is counted; at step
number STEP the program kills itself with SIGKILL. Without a STEP it prints how many there were.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

from celery_rabbitdelay.kombu import Publisher
from celery_rabbitdelay.registry.store import Store
from tests.kernel.integration.shop import make_app


def main() -> None:
    """Do what the standard input says."""
    what, last = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    steps = count(1)

    def step() -> None:
        if next(steps) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def count_around(owner: type, name: str) -> None:
        method: Callable[..., Any] = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            step()
            answer = method(*args, **kwargs)
            step()
            return answer

        setattr(owner, name, counted)

    given = json.load(sys.stdin)
    app: Any = make_app(json.loads(os.environ["SHOP"]))
    count_around(Publisher, "publish")
    count_around(Store, "of_each")
    act = app.tasks["note"].apply_async if what == "send" else app.rabbitdelay.postpone
    act(**given)
    print(next(steps) - 1)


if __name__ == "__main__":
    main()
