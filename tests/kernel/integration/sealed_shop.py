"""The shop of the integration tests whose messages are encrypted, in a worker and for commands."""

import os
from typing import Any, Final

from cryptography.fernet import Fernet
from kombu.serialization import register
from kombu.utils import json

from tests.kernel.integration.worker import ShopProcess, Worker

#: Only for tests.
FERNET: Final = Fernet("YSBrZXkgdGhhdCBlbmNyeXB0cyBvdXIgbWVzc2FnZXM=")

#: Not UTF-8, so that no part of the way takes a body for text.
MAGIC: Final = b"\xff\x00\xfe"


def sealed(app: Any) -> Any:
    """Let an application encrypt whatever it sends, and take nothing else."""
    any_register: Any = register  # its types know texts only
    any_register(
        "encrypted",
        lambda body: MAGIC + FERNET.encrypt(json.dumps(body).encode()),
        lambda body: json.loads(FERNET.decrypt(bytes(body).removeprefix(MAGIC))),
        content_type="application/x-shop-encrypted",
        content_encoding="binary",
    )
    for kind in ("task", "result", "event"):
        app.conf[f"{kind}_serializer"] = "encrypted"
    app.conf.accept_content = ["encrypted"]
    app.amqp.argsrepr_maxsize = app.amqp.kwargsrepr_maxsize = 0
    return app


class SealedProcess(ShopProcess):
    """A process of that application."""

    module = "tests.kernel.integration.sealed_shop"


class SealedWorker(SealedProcess, Worker):
    """Its worker."""


if ShopProcess.variable in os.environ:
    from tests.kernel.integration import shop

    app = sealed(shop.app)
