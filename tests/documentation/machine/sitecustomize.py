"""Lets a page's programs find the tests' servers on the ports that the page names.

A reader has RabbitMQ on port 5672 of the machine, its management API on 15672 and Redis on 6379.
The tests' servers have free ports of their own. Python imports this module at its start from
``PYTHONPATH``; a connection to ``localhost:5672`` then goes to the tests' RabbitMQ. The code of the
pages is not changed. ``READER_PORTS`` has the ports, as JSON.
"""

import json
import os
import socket
from typing import Any

_PORTS = {int(shown): port for shown, port in json.loads(os.environ["READER_PORTS"]).items()}
_LOCAL = {"localhost", "127.0.0.1", "::1"}


def _moved(address: Any) -> Any:
    """Return the address of the tests' server for one that a page names."""
    if isinstance(address, tuple) and address[0] in _LOCAL and address[1] in _PORTS:
        return ("127.0.0.1", _PORTS[address[1]])
    return address


class _Socket(socket.socket):
    """A socket that connects to the servers of the tests."""

    def connect(self, address: Any) -> None:
        super().connect(_moved(address))

    def connect_ex(self, address: Any) -> int:
        return super().connect_ex(_moved(address))


socket.socket = _Socket  # type: ignore[misc]
