"""The shop of the integration tests whose messages are signed or encrypted.

The environment variable ``SEAL`` says how: ``auth``, with the key and the certificate in the folder
``SEAL_FOLDER``, or ``encrypted``, with a key made for the test. As a program it sends tasks: its
argument is a JSON list of the name of a function of this module and what it takes; it prints a JSON
list of what they return.
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

SEAL = os.environ["SEAL"]
FOLDER = os.environ["SEAL_FOLDER"]

#: Not UTF-8, so that no part of the way takes a body for text.
MAGIC = b"\xff\x00\xfe"


def _encrypts() -> None:
    fernet = Fernet(os.environ["SEAL_KEY"])
    any_register: Any = register  # its types know texts only
    any_register(
        "encrypted",
        lambda body: MAGIC + fernet.encrypt(kombu_json.dumps(body).encode()),
        lambda body: kombu_json.loads(fernet.decrypt(bytes(body).removeprefix(MAGIC))),
        content_type="application/x-shop-encrypted",
        content_encoding="binary",
    )


if SEAL == "encrypted":
    _encrypts()
app.conf.update(
    task_serializer=SEAL, result_serializer=SEAL, event_serializer=SEAL, accept_content=[SEAL]
)
if SEAL == "auth":
    app.conf.update(
        security_key=f"{FOLDER}/key.pem",
        security_certificate=f"{FOLDER}/certificate.pem",
        security_cert_store=f"{FOLDER}/certificate.pem",
    )
    app.setup_security()
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


def pending() -> list[str]:
    """Return the ids of the tasks that are tracked."""
    return [each.task_id for each in app.rabbitdelay.pending()]


if __name__ == "__main__":
    print(json.dumps([globals()[name](*given) for name, *given in json.loads(sys.argv[1])]))  # noqa: T201
