"""The shop of the integration tests whose messages are encrypted.

The key is in the environment variable ``SEAL_KEY``. As a program it sends tasks: its argument is a
JSON list of the name of a function of this module and what it takes; it prints a JSON list of what
they return.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography.fernet import Fernet
from kombu.serialization import register
from kombu.utils import json as kombu_json

from tests.integration.shop import app

#: Not UTF-8, so that no part of the way takes a body for text.
MAGIC = b"\xff\x00\xfe"


FERNET = Fernet(os.environ["SEAL_KEY"])

any_register: Any = register  # its types know texts only
any_register(
    "encrypted",
    lambda body: MAGIC + FERNET.encrypt(kombu_json.dumps(body).encode()),
    lambda body: kombu_json.loads(FERNET.decrypt(bytes(body).removeprefix(MAGIC))),
    content_type="application/x-shop-encrypted",
    content_encoding="binary",
)
for of in ("task", "result", "event"):
    app.conf[f"{of}_serializer"] = "encrypted"
app.conf.accept_content = ["encrypted"]
app.amqp.argsrepr_maxsize = app.amqp.kwargsrepr_maxsize = 0


def apply(name: str, args: list[Any], kwargs: dict[str, Any], options: dict[str, Any]) -> str:
    """Send a task; return its id."""
    if "link" in options:
        options = {**options, "link": app.signature(*options["link"], immutable=True)}
    return str(app.tasks[name].apply_async(tuple(args), kwargs, **options).id)


def send_many(name: str, rows: list[dict[str, Any]], delay: float) -> int:
    """Send tasks that are due together; return in how many messages."""
    eta = datetime.now(UTC) + timedelta(seconds=delay)
    due = [{**row, "eta": eta} for row in rows]
    return int(app.rabbitdelay.send_many(app.tasks[name], due).messages)


def postpone(task_id: str, delay: float) -> str:
    """Let a task run at another time."""
    return str(app.rabbitdelay.postpone(task_id, delay=delay))


if __name__ == "__main__":
    print(json.dumps([globals()[name](*given) for name, *given in json.loads(sys.argv[1])]))  # noqa: T201
