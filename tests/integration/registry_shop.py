# ruff: noqa: T201  # a program tells its test what it has done
"""Programs that send, supersede, postpone and end jobs, and are killed at a step that a test names.

``python -m tests.integration.registry_shop WHAT STEP``, with the application's settings in the
environment variable ``SHOP`` and what to do as JSON on the standard input. Before and after a
message is published, and before and after each call of the registry, a step is counted; at step
number STEP the program kills itself with SIGKILL. Without a STEP it prints how many there were.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from celery_rabbitdelay.kombu import Publisher
from celery_rabbitdelay.registry.connection import Store
from tests.integration.shop import make_app


class Steps:
    """Counts steps, and dies at one of them."""

    def __init__(self, last: int | None) -> None:
        self.count = 0
        self._last = last

    def step(self) -> None:
        self.count += 1
        if self.count == self._last:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: type, name: str) -> None:
        """Count a step before and after each call of a method."""
        method: Callable[..., Any] = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.step()
            answer = method(*args, **kwargs)
            self.step()
            return answer

        setattr(owner, name, counted)


def main() -> None:
    """Do what the standard input says."""
    what = sys.argv[1]
    steps = Steps(int(sys.argv[2]) if len(sys.argv) > 2 else None)
    given = json.load(sys.stdin)
    app: Any = make_app(json.loads(os.environ["SHOP"]))
    steps.around(Publisher, "publish_one")
    steps.around(Store, "call_each")
    match what:
        case "send":
            app.tasks["note"].apply_async(**given)
        case "supersede":
            for number in range(given.pop("times")):
                args = [f"{given['name']}-{number}"]
                app.tasks["note"].apply_async(args, **given["options"])
                print(args[0], flush=True)
            return
        case "postpone":
            app.rabbitdelay.postpone(given["task_id"], delay=given["delay"])
        case "commit":
            app.rabbitdelay.commit_job(given["job"])
        case "abort":
            app.rabbitdelay.abort_job(given["job"])
    print(steps.count)


if __name__ == "__main__":
    main()
