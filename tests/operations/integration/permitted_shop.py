"""An application with Celery's default queue, as each user of the broker runs it."""

import json
import os
from typing import Any

from celery_rabbitdelay import Celery
from tests.celery_process import CeleryProcess

VARIABLE = "PERMITTED_SHOP"


def make_app(settings: dict[str, Any]) -> Any:
    """Create the application."""
    app = Celery("shop", set_as_current=False)
    app.conf.update(worker_hijack_root_logger=False, **settings)

    @app.task(name="remind", shared=False)
    def remind(order: int) -> int:
        return order

    return app


class Program(CeleryProcess):
    """A program of the application."""

    module = "tests.operations.integration.permitted_shop"
    variable = VARIABLE


class Worker(Program):
    """Its worker."""

    def _command(self) -> list[str]:
        return self.celery(f"worker -c 1 -l INFO -n permitted-{self.port}@localhost")

    def _ready(self) -> bool:
        return " ready." in self.log


if VARIABLE in os.environ:
    app = make_app(json.loads(os.environ[VARIABLE]))
