"""Short commands of ``celery`` in processes that have imported it before they begin.

Importing Celery takes most of the time of such a command. The standard library's fork server does
it once, and does nothing else; each command is a fork of it. Workers are started as anywhere else,
and so are the commands of the acceptance tests.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

_FORKS: Final = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["celery.bin.celery", "celery.backends.redis", "kombu.transport.pyamqp"]
)

#: The files that a command has as its standard streams.
_STREAMS: Final = ("stdin", "stdout", "stderr")


def run(
    arguments: list[str], environment: dict[str, str], given: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run ``celery`` to its end.

    Args:
        arguments: Its arguments.
        environment: Its environment.
        given: Its standard input.
    """
    with TemporaryDirectory(prefix="rabbitdelay-") as folder:
        files = {name: Path(folder, name) for name in _STREAMS}
        files["stdin"].write_text(given)
        process = _FORKS.Process(target=_celery, args=(arguments, environment, files))
        process.start()
        try:
            process.join()
        finally:
            process.kill()
        printed, said = files["stdout"].read_text(), files["stderr"].read_text()
    assert process.exitcode is not None
    return subprocess.CompletedProcess(["celery", *arguments], process.exitcode, printed, said)


def _celery(arguments: list[str], environment: dict[str, str], files: dict[str, Path]) -> None:
    """Be ``celery``: what a fork does."""
    from celery.bin.celery import main

    for number, name in enumerate(_STREAMS):
        how = os.O_RDONLY if name == "stdin" else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        os.dup2(os.open(files[name], how), number)
    sys.stdin = os.fdopen(0)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["celery", *arguments]
    try:
        sys.exit(main())
    finally:
        atexit._run_exitfuncs()
