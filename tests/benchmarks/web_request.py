# ruff: noqa: T201  # a program at the terminal prints
"""How long one send in a web request takes while the broker is in trouble, beside Celery's."""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from threading import Timer
from typing import Any, Final

import celery
from kombu import pools

from celery_rabbitdelay import Celery
from celery_rabbitdelay.testing import RabbitMQServer
from celery_rabbitdelay.testing.servers import free_port
from tests.kernel.integration.trouble import alarm, suspended
from tests.private_broker import private_broker

#: Seconds until a send is given up.
PATIENCE: Final = 60.0

#: The settings that the documentation recommends for a web server.
WEB: Final = {"broker_connection_timeout": 1, "rabbitdelay_confirm_timeout": 3}
CONFIRMS: Final = {"broker_transport_options": {"confirm_publish": True}}

#: The class of the application and its settings.
WAYS: Final[dict[str, tuple[type[celery.Celery], dict[str, Any]]]] = {
    "Celery": (celery.Celery, {}),
    "Celery with confirms": (celery.Celery, CONFIRMS),
    "delay": (Celery, {}),
    "delay, settings for the web": (Celery, WEB),
    "check": (Celery, {}),
}


def outcome(act: Callable[[], object], is_loaded: bool) -> str:
    """Send once, or again and again until a send fails, and return how long that one took."""
    while True:
        began = time.monotonic()
        try:
            act()
        except Exception as error:  # noqa: BLE001  # whatever it raises is what is measured
            return f"{(time.monotonic() - began) * 1000:,.0f} ms {type(error).__name__}"
        if not is_loaded:
            return f"{(time.monotonic() - began) * 1000:,.0f} ms ok"


def show(
    name: str, url: str, trouble: Any, *, is_connected: bool = True, is_loaded: bool = False
) -> None:
    """Print the row of a trouble, each way in a thread of its own."""
    pools.reset()  # applications with the same URL would share their connections
    acts: list[Callable[[], object]] = []
    for way, (cls, settings) in WAYS.items():
        app: Any = cls("measured", broker=url, set_as_current=False)
        app.conf.update(settings)
        send = partial(app.send_task, "remind", countdown=3600)
        acts.append(app.rabbitdelay.check if way == "check" else send)
        if is_connected:
            acts[-1]()
    with ThreadPoolExecutor() as threads, trouble:
        sends = [threads.submit(outcome, act, is_loaded) for act in acts]
        wait(sends, PATIENCE)
        cells = [each.result() if each.done() else f"above {PATIENCE:.0f} s" for each in sends]
        print("|", " | ".join([name, *cells]), "|", flush=True)


@contextmanager
def no_answer_to_syn() -> Iterator[str]:
    """The URL of a host that does not answer: its queue of connections is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as stack:
        address = server.getsockname()
        for _ in range(3):
            filling = stack.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(address)
        yield f"amqp://guest:guest@127.0.0.1:{address[1]}//"


@contextmanager
def killed_later(broker: RabbitMQServer) -> Iterator[None]:
    """A broker is killed after a second."""
    killing = Timer(1, broker.kill)
    killing.start()
    yield
    killing.join()


def web_request() -> None:
    """How long one send takes while the broker is in trouble, beside Celery's, and ``check()``."""
    print("|", " | ".join(["RabbitMQ", *WAYS]), "|", flush=True)
    refused = f"amqp://guest:guest@127.0.0.1:{free_port()}//"
    show("does not listen", refused, nullcontext(), is_connected=False)
    with no_answer_to_syn() as url:
        show("host unreachable", url, nullcontext(), is_connected=False)
    with private_broker() as broker:
        Celery(broker=broker.url).send_task("remind", countdown=3600)  # declares
        show("answers", broker.url, nullcontext())
        show("frozen", broker.url, suspended(broker))
        show("frozen, not connected yet", broker.url, suspended(broker), is_connected=False)
        show("memory alarm", broker.url, alarm(broker))
        show("killed under load", broker.url, killed_later(broker), is_loaded=True)
