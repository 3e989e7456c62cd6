"""An application without a broker, and its commands."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_rabbitdelay import Celery
from celery_rabbitdelay.command.group import rabbitdelay


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
        context = CLIContext(app=app, no_color=True, workdir=None, quiet=False)
        return CliRunner().invoke(rabbitdelay, arguments, obj=context)

    yield run
    for app in made:
        app.close()
