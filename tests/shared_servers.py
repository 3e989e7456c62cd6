"""Servers that all processes of a test run share: the first that needs one starts it.

That process stops it as well, once all others have left it.
"""

import copy
import fcntl
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from celery_rabbitdelay.testing import Server

AnyServer = TypeVar("AnyServer", bound=Server)


class _Used(NamedTuple):
    """A server that this process uses.

    Attributes:
        folder: The folder of :func:`shared`.
        users: The file that each user has a shared lock of.
        started: The server, if this process has started it.
    """

    folder: Path
    users: TextIOWrapper
    started: Server | None


_USED: Final[list[_Used]] = []


def shared(folder: Path, make: Callable[[], AnyServer]) -> AnyServer:
    """Return a server that runs; unless this process started it, a copy that cannot be killed.

    Args:
        folder: A folder of this server that all processes of the run know.
        make: Makes the server, which is not started yet.
    """
    folder.mkdir(exist_ok=True)
    started = None
    with _locked(folder):
        described = folder / "server"
        if not described.exists():
            started = make()
            started.start()
            without = copy.copy(started)
            vars(without).update(dict.fromkeys({"_process", "_mapper"} & vars(without).keys()))
            described.write_bytes(pickle.dumps(without))
        server: AnyServer = started or pickle.loads(described.read_bytes())
        users = (server.folder / "users").open("w")
        fcntl.flock(users, fcntl.LOCK_SH)
    _USED.append(_Used(folder, users, started))
    return server


def leave() -> None:
    """Leave all servers; stop what this process has started when no other one uses it."""
    while _USED:
        folder, users, started = _USED.pop()
        if started is not None:
            with _locked(folder):
                (folder / "server").unlink()  # who needs one now starts another
            fcntl.flock(users, fcntl.LOCK_EX)
            started.stop()
        users.close()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
