"""An application without a broker, and its commands."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import Result

from celery_rabbitdelay import Celery
from tests.json_schemas import invoke


@pytest.fixture
def app() -> Iterator[Celery]:
    """An application that nothing connects."""
    app = Celery("shop", broker="amqp://", set_as_current=False)
    yield app
    app.close()


@pytest.fixture
def offline() -> Iterator[Callable[..., Result]]:
    """Runs a command of ``celery rabbitdelay`` for an application whose broker is down."""
    made: list[Celery] = []

    def run(*arguments: str, **settings: Any) -> Result:
        app = Celery("shop", broker="amqp://guest:guest@127.0.0.1:1//", set_as_current=False)
        app.conf.update(settings)
        made.append(app)
        return invoke(app, arguments)

    yield run
    for app in made:
        app.close()
