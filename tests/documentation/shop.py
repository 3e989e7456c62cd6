"""The application that the pages of the documentation import, in a folder of their own."""

import os

from celery_rabbitdelay import Celery

app = Celery("shop", broker="amqp://")
# Pages stop brokers and delete levels, and count what is undeliverable then: no probes.
app.conf.rabbitdelay_modules = ["check-in", "distribution"]
# Pages about the registry set this variable, to the Redis of the tests.
app.conf.rabbitdelay_registry_url = os.environ.get("SHOP_REGISTRY_URL")
app.conf.rabbitdelay_registry_options = {"socket_timeout": 10}  # on a slow machine


@app.task
def remind(order: int) -> None:
    print(f"please pay order {order}")  # noqa: T201 - the pages show it


@app.task
def pay(order: int) -> None: ...


@app.task
def ship(order: int) -> None: ...


@app.task
def count(order: int) -> int:
    return 1


@app.task
def total(counts: list[int]) -> int:
    return sum(counts)
