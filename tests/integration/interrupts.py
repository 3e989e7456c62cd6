"""Interrupting a conversation behind any operation of its socket.

A soft time limit is an exception that a signal handler raises, once a call of the operating system
has returned. The sockets are real, and so are the servers.
"""

from __future__ import annotations

import gc
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakSet

import pytest
from celery.exceptions import SoftTimeLimitExceeded

#: One that is an ``Exception``, and one that is not, as those of gevent, greenlet and asyncio.
INTERRUPTS: Final = (SoftTimeLimitExceeded, KeyboardInterrupt)

#: What a conversation consists of. Closing is not among it.
OPERATIONS: Final = (
    *((socket.socket, name) for name in ("connect", "send", "sendall", "recv", "recv_into")),
    *((ssl.SSLSocket, name) for name in ("do_handshake", "read", "write")),
)


class Interrupter:
    """Raises an exception at one of the operations on the sockets that it watches."""

    def __init__(self) -> None:
        self.sockets: WeakSet[socket.socket] = WeakSet()
        #: The socket that was interrupted, and how often it was used after that.
        self.struck: socket.socket | None = None
        self.is_connecting = False
        self.used_later: list[str] = []
        self._error: BaseException | None = None
        self._left = 0

    def watched(self, cls: type, name: str) -> Callable[..., Any]:
        """Return a method of sockets that may be interrupted."""
        method = getattr(cls, name)

        def call(own: socket.socket, *arguments: Any, **options: Any) -> Any:
            if own.family not in (socket.AF_INET, socket.AF_INET6):
                return method(own, *arguments, **options)
            self.sockets.add(own)
            if own is self.struck:
                self.used_later.append(name)
            answer = method(own, *arguments, **options)
            self._left -= 1
            if self._left == 0 and self._error is not None:
                error, self._error, self.struck = self._error, None, own
                self.is_connecting = name == "connect"
                raise error
            return answer

        return call

    @property
    def open(self) -> int:
        """How many sockets are open."""
        return sum(each.fileno() >= 0 for each in self.sockets)

    def forget_errors(self, most: int) -> None:
        """Free the sockets in frames of errors; a frame that has its own error keeps itself."""
        if self.open > most:
            gc.collect()

    def interrupt(self, call: Callable[[], object], at: int, error: BaseException) -> bool:
        """Call, and raise an error behind an operation; return False if there are not so many.

        What arrives at the caller is that error, as soon as the connection is closed.
        """
        self._error, self._left, self.struck, self.used_later = error, at, None, []
        raised: BaseException | None = None
        try:
            call()
        except type(error) as own:
            raised = own
        is_over, self._error = self._error is not None, None
        if is_over:
            return False
        assert raised is error, f"swallowed at operation {at}"
        assert self.struck is not None
        # The frame that connects has the socket, until the error is handled.
        is_closed = self.is_connecting or self.struck.fileno() < 0
        assert is_closed, f"the connection is open after operation {at}"
        assert not self.used_later, f"used after operation {at}: {self.used_later}"
        self.struck = None
        return True


@contextmanager
def interrupter() -> Iterator[Interrupter]:
    """Watch all sockets that are connected in the block."""
    watching = Interrupter()
    with pytest.MonkeyPatch.context() as patch:
        for cls, name in OPERATIONS:
            patch.setattr(cls, name, watching.watched(cls, name))
        yield watching


def interrupt_anywhere(watching: Interrupter, call: Callable[[], object]) -> int:
    """Interrupt a call at each of its operations, and call again after each interrupt.

    Args:
        watching: Watches the sockets that the call opens; all of them were opened by former calls.
        call: Checks that the answer is its own.

    Returns:
        The number of its operations.
    """
    call()
    most, at = watching.open, 1
    # An answer is read in several operations: both kinds strike in nearly each frame.
    while watching.interrupt(call, at, INTERRUPTS[at % 2]()):
        call()
        watching.forget_errors(most)
        assert watching.open <= most, f"a connection is left open after operation {at}"
        at += 1
    return at
