"""The Django project ``django_shop``: copied to a temporary folder, and its commands as processes.

Django is configured once for a process and for good, so nothing of it is imported here.
"""

import json
import os
import shlex
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from celery_rabbitdelay.testing import wait_for
from celery_rabbitdelay.testing.servers import PATIENCE
from tests.celery_process import REPOSITORY, CeleryProcess

#: The project's files.
SOURCE: Final = Path(__file__).parent / "django_shop"

#: The two ways to write ``django_shop/celery.py``.
APPLICATIONS: Final = {
    "Celery": SOURCE / "django_shop" / "celery.py",
    "install": SOURCE / "celery_installed.py",
}

#: The commands of the project, as its users type them.
MIGRATE: Final = "python manage.py migrate"
WORKER: Final = "celery -A django_shop worker"
BEAT: Final = "celery -A django_shop beat -S django_celery_beat.schedulers:DatabaseScheduler"


class Project:
    """A copy of the project, with a database of its own.

    Args:
        folder: Where to copy it to; it must not exist.
        application: The file to be its ``celery.py``.
        settings: What differs from its ``settings.py``.
    """

    def __init__(self, folder: Path, application: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.settings = settings
        shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copyfile(application, folder / "django_shop" / "celery.py")

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the project's commands."""
        paths = f"{self.folder}{os.pathsep}{REPOSITORY}"
        return {**ProjectProcess.environment(self.settings), "PYTHONPATH": paths}

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [*command_line(command), *arguments],
            cwd=self.folder,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=False,
        )

    def call(self, code: str) -> Any:
        """Run code with Django in a process of its own; return what it assigns to ``answer``."""
        shell = f"import json\n{code}\nprint(json.dumps(answer))"
        run = self.run("python manage.py shell -c", shell)
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout.splitlines()[-1])

    def wait_for_results(self, task: str, count: int, periodic: str | None = None) -> list[Any]:
        """Wait until the database has so many results of a task, sent by a periodic one if given.

        Args:
            task: The task's name.
            count: How many results.
            periodic: The name of the periodic task that sent it.
        """
        query = (
            "SELECT result FROM django_celery_results_taskresult "
            "WHERE status = 'SUCCESS' AND task_name = ? AND periodic_task_name IS ? ORDER BY id"
        )
        found: list[Any] = []

        def came() -> bool:
            with closing(sqlite3.connect(self.folder / "db.sqlite3", timeout=60)) as database:
                found[:] = [
                    json.loads(each) for (each,) in database.execute(query, (task, periodic))
                ]
            return len(found) >= count

        wait_for(came, f"{count} results of {task}", PATIENCE, interval=0.1)
        return found


class ProjectProcess(CeleryProcess):
    """A command of the project that runs until it is stopped.

    Args:
        project: The project.
        command: :data:`WORKER` or :data:`BEAT`, and more options.
        ready: What the command logs when it is ready.
    """

    module = "django_shop"
    variable = "DJANGO_SHOP"

    def __init__(self, project: Project, command: str, ready: str) -> None:
        super().__init__(project.settings)
        self._project, self._line, self._says = project, command, ready

    def _command(self) -> list[str]:
        return [*command_line(self._line), "-l", "INFO", "--pidfile", ""]

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), **self._project.environment}

    def _ready(self) -> bool:
        return self._says in self.log


def command_line(command: str) -> list[str]:
    """Return a command of ``python`` or ``celery``, run by the Python that runs the tests."""
    program, *arguments = shlex.split(command)
    return [sys.executable, *(["-m", "celery"] if program == "celery" else []), *arguments]
