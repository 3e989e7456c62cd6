"""Programs of ``celery`` in processes that have imported it before they begin.

Importing Celery takes most of the time of a command or of a worker's start. The standard library's
fork server does it once, and does nothing else; each program is a fork of it. The programs of the
acceptance tests are started as anywhere else.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from celery_rabbitdelay.testing.servers import end_with_parent

_FORKS: Final = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "celery.bin.celery",
        "celery.backends.redis",
        "celery.app.log",
        "celery.apps.worker",
        "celery.events.state",
        "celery.concurrency.prefork",
        "celery.worker.autoscale",
        "celery.worker.consumer",
        "celery.worker.strategy",
        "kombu.transport.pyamqp",
        "celery_rabbitdelay.testing",
        "celery_rabbitdelay.worker.bootsteps",
        "celery_rabbitdelay.worker.restore",
    ]
)

CELERY: Final = "celery"

#: The application of the other programs.
SHOP: Final = "tests.kernel.integration.shop"

#: The files that a command has as its standard streams.
_STREAMS: Final = ("stdin", "stdout", "stderr")


def run(
    arguments: list[str], environment: dict[str, str], given: str = "", module: str = CELERY
) -> subprocess.CompletedProcess[str]:
    """Run ``celery``, or another module that imports it, to its end.

    Args:
        arguments: Its arguments.
        environment: Its environment.
        given: Its standard input.
        module: The module, which is run as ``python -m`` runs it.
    """
    with TemporaryDirectory(prefix="rabbitdelay-") as folder:
        files = {name: Path(folder, name) for name in _STREAMS}
        files["stdin"].write_text(given)
        process = Program(arguments, environment, files, module=module)
        try:
            status = process.wait()
        finally:
            process.kill()
        printed, said = files["stdout"].read_text(), files["stderr"].read_text()
    return subprocess.CompletedProcess([module, *arguments], status, printed, said)


class Program:
    """A running ``celery``, with what :class:`subprocess.Popen` has for whoever waits for it.

    Args:
        arguments: Its arguments.
        environment: Its environment.
        files: The files that are its standard streams, by the streams' names.
        folder: Where it runs, and then as the leader of a session of its own; None: here.
        module: Another module that is run in its place.
    """

    def __init__(
        self,
        arguments: list[str],
        environment: dict[str, str],
        files: dict[str, Path],
        folder: Path | None = None,
        module: str = CELERY,
    ) -> None:
        given = (module, arguments, environment, files, folder)
        self._process = _FORKS.Process(target=_run, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid: Final = self._process.pid

    def poll(self) -> int | None:
        """Return its exit status, or the signal that ended it as a negative number."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, at most so many seconds, and return the same.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("celery", timeout or 0)
        return status

    def kill(self) -> None:
        """End it, if it runs."""
        self._process.kill()


def _run(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    files: dict[str, Path],
    folder: Path | None,
) -> None:
    """Be that program: what a fork does."""
    from celery.bin.celery import main

    end_with_parent()
    if folder is not None:
        os.setsid()
        os.chdir(folder)
    for number, name in enumerate(_STREAMS):
        how = os.O_RDONLY if name == "stdin" else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        os.dup2(os.open(files[name], how), number)
    sys.stdin = os.fdopen(0)
    # If the main program has imported the application, the fork has too: without its settings.
    application = arguments[arguments.index("-A") + 1] if "-A" in arguments else SHOP
    if sys.modules.pop(application, None) is not None:
        package, _, name = application.rpartition(".")
        delattr(sys.modules[package], name)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    try:
        if module == CELERY:
            sys.exit(main())
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
