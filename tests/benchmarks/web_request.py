"""How long one send in a web request takes while the broker is in trouble, beside Celery's.

``python -m tests.benchmarks.web_request`` prints a table for each trouble and way of sending. Each
send runs in a process of its own, which is killed after a minute.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection as Pipe
from typing import Any, Final

import celery

from celery_rabbitdelay import Celery
from celery_rabbitdelay.testing import RabbitMQServer
from celery_rabbitdelay.testing.servers import free_port
from tests.integration.trouble import alarm, suspended
from tests.private_broker import private_broker

#: Seconds until a send is given up.
PATIENCE: Final = 60.0

#: The settings that the documentation recommends for a web server.
WEB: Final = {"broker_connection_timeout": 1, "rabbitdelay_confirm_timeout": 3}

#: The class of the application, its settings, and what is measured.
WAYS: Final[dict[str, tuple[type[celery.Celery], dict[str, Any], str]]] = {
    "Celery": (celery.Celery, {}, "send"),
    "Celery with confirms": (
        celery.Celery,
        {"broker_transport_options": {"confirm_publish": True}},
        "send",
    ),
    "delay": (Celery, {}, "send"),
    "delay, settings for the web": (Celery, WEB, "send"),
    "check": (Celery, {}, "check"),
}


def measure(url: str, way: str, is_connected: bool, is_loaded: bool, pipe: Pipe) -> None:
    """Send once, or again and again until a send fails, and return how long that one took."""
    cls, settings, what = WAYS[way]

    def act(app: Any) -> None:
        if what == "check":
            app.rabbitdelay.check()
        else:
            app.send_task("remind", countdown=3600)

    app = cls("measured", broker=url)
    app.conf.update(settings)
    if is_connected:
        act(app)
    else:
        # All modules are imported, as in a server that has sent before.
        with suppress(Exception):
            act(cls("nowhere", broker="amqp://127.0.0.1:1//"))
    pipe.send("ready")
    pipe.recv()
    while True:
        began = time.monotonic()
        try:
            act(app)
            outcome = "returns"
        except Exception as error:  # noqa: BLE001  # whatever it raises is what is measured
            arrived = getattr(error, "may_have_arrived", None)
            outcome = f"{type(error).__name__}" + (" (may have arrived)" if arrived else "")
        if outcome != "returns" or not is_loaded:
            break
    pipe.send((round((time.monotonic() - began) * 1000), outcome))


def rows(
    name: str,
    url: str,
    trouble: Callable[[], Any],
    *,
    is_connected: bool = True,
    is_loaded: bool = False,
) -> None:
    """Print the row of a trouble."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        running: list[tuple[Any, Pipe]] = []
        for way in WAYS:
            ours, theirs = context.Pipe()
            arguments = url, way, is_connected, is_loaded, theirs
            process = context.Process(target=measure, args=arguments)
            process.start()
            stack.callback(process.kill)
            running.append((process, ours))
        for _, pipe in running:
            assert pipe.recv() == "ready"
        if is_loaded:
            for _, pipe in running:
                pipe.send("go")
            time.sleep(1)
        with trouble():
            if not is_loaded:
                for _, pipe in running:
                    pipe.send("go")
            deadline = time.monotonic() + PATIENCE
            cells = []
            for _, pipe in running:
                if pipe.poll(max(deadline - time.monotonic(), 0)):
                    milliseconds, outcome = pipe.recv()
                    cells.append(f"{milliseconds:,} ms {outcome}")
                else:
                    cells.append(f"above {PATIENCE:,.0f} s")
            print("|", " | ".join([name, *cells]), "|", flush=True)  # noqa: T201
            for process, _ in running:
                process.kill()
                process.join()


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
def nothing() -> Iterator[None]:
    """The trouble is there already."""
    yield


def main() -> None:
    """Measure each trouble."""
    print("|", " | ".join(["trouble", *WAYS]), "|", flush=True)  # noqa: T201
    refused = f"amqp://guest:guest@127.0.0.1:{free_port()}//"
    rows("not listening", refused, nothing, is_connected=False)
    with no_answer_to_syn() as url:
        rows("no answer to SYN", url, nothing, is_connected=False)
    with private_broker() as broker:
        Celery(broker=broker.url).send_task("remind", countdown=3600)  # declares
        rows("none", broker.url, nothing)
        on(broker)


def on(broker: RabbitMQServer) -> None:
    """Measure the troubles of a broker that runs."""
    rows("frozen", broker.url, lambda: suspended(broker))
    rows("frozen, not connected", broker.url, lambda: suspended(broker), is_connected=False)
    rows("memory alarm", broker.url, lambda: alarm(broker))

    @contextmanager
    def killed() -> Iterator[None]:
        broker.kill()
        yield

    rows("killed under load", broker.url, killed, is_loaded=True)


if __name__ == "__main__":
    main()
