"""The page, served by its command, and who may sign in."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kombu import Connection

from celery_rabbitdelay.web.options import hash_of
from tests.kernel.integration.conftest import application, small_configuration
from tests.kernel.integration.shop import named
from tests.kernel.integration.worker import ShopProcess, answers

#: An operator, and the password.
OPERATOR, PASSWORD = "ada", "correct horse"

#: A layout whose highest digits last for hours, so that nothing is due during a test unless the
#: test says so, and that has few queues.
HOURS: Final = [("hours", 4, 3600), ("minutes", 12, 300), ("halves", 10, 30), ("seconds", 30, 1)]

HOUR: Final = 3600


def with_users(redis_url: str, **options: Any) -> dict[str, Any]:
    """Return settings: tracked tasks, which wait for hours, and a page with a user.

    Args:
        redis_url: The URL of the Redis of the registry.
        **options: Further options of the page.
    """
    users = {OPERATOR: {"password": hash_of(PASSWORD), "role": "operator"}}
    return {
        "rabbitdelay_layout": HOURS,
        "rabbitdelay_registry_url": redis_url,
        "rabbitdelay_track": "all",
        "rabbitdelay_web": {"users": users, **options},
    }


@contextmanager
def standing_shop(broker_url: str, redis_url: str, **settings: Any) -> Iterator[Any]:
    """An application whose levels and default queue stand; no worker serves it."""
    with (
        application(small_configuration(broker_url, redis_url, **settings)) as app,
        Connection(broker_url) as connection,
    ):
        app.rabbitdelay.declare(connection)
        app.amqp.queues[named(app, "default")](connection.default_channel).declare()
        yield app


class ServedPage(ShopProcess):
    """``celery -A tests.kernel.integration.shop rabbitdelay web``.

    Args:
        settings: What :func:`tests.kernel.integration.shop.make_app` takes.
    """

    def address(self, name: str = "localhost") -> str:
        """Return its address under a name; a browser asks for a password for each."""
        host = name if name == "localhost" or "." in name else f"{name}.localhost"
        return f"http://{host}:{self.port}"

    def _command(self) -> list[str]:
        return self.celery(f"rabbitdelay web --port={self.port}")

    def _ready(self) -> bool:
        return answers(f"http://127.0.0.1:{self.port}/static/icon.svg")
