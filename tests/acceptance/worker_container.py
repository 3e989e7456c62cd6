"""The worker of the acceptance tests, whether it is a container or a process."""

from __future__ import annotations

from types import ModuleType

from pytest_celery import CeleryWorkerContainer

from tests.acceptance import journal_task, worker_app
from tests.acceptance.names import QUEUE


class AcceptanceWorkerContainer(CeleryWorkerContainer):  # type: ignore[misc]
    """pytest-celery's worker with our Celery class, our queue and our task."""

    @classmethod
    def worker_queue(cls) -> str:
        """The queue that the worker consumes from."""
        return QUEUE

    @classmethod
    def app_module(cls) -> ModuleType:
        """The template of the worker's ``app.py``."""
        return worker_app

    @classmethod
    def tasks_modules(cls) -> set[ModuleType]:
        """pytest-celery's own tasks (``CeleryTestSetup.ready(ping=True)`` needs them) and ours."""
        return {*super().tasks_modules(), journal_task}

    @classmethod
    def initial_content(cls, *args: object, **kwargs: object) -> dict[str, bytes]:
        """Return the files of the worker's folder."""
        content: dict[str, bytes] = super().initial_content(*args, **kwargs)
        # Regular packages: elsewhere on the path another `tests` may be found before a bare folder.
        return {**content, "tests/__init__.py": b"", "tests/acceptance/__init__.py": b""}
