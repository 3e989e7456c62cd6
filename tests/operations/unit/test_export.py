"""A topology in other formats has everything that ``declare`` makes, and nothing else."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import hcl2  # type: ignore[import-untyped,unused-ignore]
import pytest
from click.testing import Result

from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.kombu import Layout, Topology, binary, clock, custom, declare, geometric
from celery_rabbitdelay.levels.layout import Zeros
from celery_rabbitdelay.operations import export
from tests.json_schemas import checked


class _Channel:
    """The methods of a channel that ``declare`` calls."""

    channel_id = 1

    def __init__(self, model: Any) -> None:
        self._model = model

    def close(self) -> None: ...

    def prepare_queue_arguments(self, arguments: Any, **others: Any) -> Any:
        assert not any(others.values())
        return arguments

    def exchange_declare(self, *, exchange: str, type: str, arguments: Any, **flags: Any) -> None:  # noqa: A002
        own = (type, flags["durable"], flags["auto_delete"], arguments or {})
        self._model.exchanges[exchange] = own

    def queue_declare(self, *, queue: str, arguments: Any, **flags: Any) -> None:
        assert not flags["exclusive"]
        self._model.queues[queue] = (flags["durable"], flags["auto_delete"], arguments or {})

    def queue_bind(self, queue: str, exchange: str, routing_key: str, nowait: bool) -> None:
        self._model.bindings.add((exchange, routing_key, queue, "queue"))

    def exchange_bind(self, destination: str, source: str, routing_key: str, nowait: bool) -> None:
        self._model.bindings.add((source, routing_key, destination, "exchange"))


class DeclaringModel:
    """What ``declare`` makes of a topology.

    Args:
        topology: The topology.

    Attributes:
        exchanges: Type, durable, auto_delete and arguments of each exchange, by its name.
        queues: Durable, auto_delete and arguments of each queue, by its name.
        bindings: Source, routing key, target, and "queue" or "exchange" of each binding.
    """

    connected = True

    def __init__(self, topology: Topology) -> None:
        self.exchanges: dict[str, Any] = {}
        self.queues: dict[str, Any] = {}
        self.bindings: set[tuple[str, ...]] = set()
        self.declared_entities: set[object] = set()
        declare(self, topology)  # type: ignore[arg-type]

    def channel(self) -> _Channel:
        return _Channel(self)


LAYOUTS: dict[str, Callable[..., Layout]] = {
    "clock": clock,
    "binary": binary,
    "geometric": geometric,
    "custom": lambda zeros: custom([("minutes", 3, 60), ("seconds", 60, 1)], zeros),
}

#: Each layout, and each way to pass a zero digit, once.
SOME = [
    pytest.param(make(zeros=zeros), id=f"{name}-{zeros}")
    for (name, make), zeros in zip(LAYOUTS.items(), (*get_args(Zeros), "skip"), strict=True)
]


BINDING = ("source", "routing_key", "destination", "destination_type")


@pytest.mark.parametrize("layout", SOME)
def test_the_definitions_have_what_declare_makes(layout: Layout) -> None:
    topology = Topology("shop", layout, "classic", 2)
    found, made = export.definitions(topology, "v"), DeclaringModel(topology)
    assert {each["vhost"] for kind in found.values() for each in kind} == {"v"}

    def named(kind: str, *keys: str) -> dict[str, Any]:
        keys = (*keys, "durable", "auto_delete", "arguments")
        return {each["name"]: tuple(each[key] for key in keys) for each in found[kind]}

    assert (named("exchanges", "type"), named("queues")) == (made.exchanges, made.queues)
    assert {tuple(each[key] for key in BINDING) for each in found["bindings"]} == made.bindings
    expected = [made.exchanges, made.queues, made.bindings]
    assert [*map(len, found.values())] == [*map(len, expected)], "none of it twice"


def local(text: str, table: str) -> Any:
    """A table of a module of Terraform; it is written as JSON."""
    (found,) = re.finditer(rf"^  {table} += (?=\{{)", text, re.M)
    return json.JSONDecoder().raw_decode(text, found.end())[0]


@pytest.mark.parametrize("layout", SOME)
def test_the_terraform_module_makes_what_declare_makes(layout: Layout) -> None:
    topology = Topology("shop.delay", layout)
    module = export.as_terraform(topology).replace("${var.name}", "other")
    made = DeclaringModel(replace(topology, prefix="other"))
    around = [local(module, each) for each in ("guard", "marker")]
    exchanges = {**local(module, "exchanges"), **{each.pop("name"): each for each in around}}
    assert {
        f"other.{name}": (each["type"], True, False, each["arguments"])
        for name, each in exchanges.items()
    } == made.exchanges
    queues = local(module, "queues")
    assert {f"other.{name}": (True, False, each) for name, each in queues.items()} == made.queues
    prefixed = {"source", "destination"}
    assert {
        tuple(f"other.{each[key]}" if key in prefixed else each[key] for key in BINDING)
        for each in local(module, "bindings").values()
    } == made.bindings


def test_the_marker_comes_last_and_queues_are_never_destroyed() -> None:
    text = export.as_terraform(Topology(layout=binary(levels=2)))
    assert hcl2.loads(text).keys() >= {"terraform", "variable", "locals", "resource"}
    assert re.findall(r'^resource "rabbitmq_(\w+)" "(\w+)"', text, re.M) == [
        *(("exchange", "guard"), ("exchange", "all"), ("queue", "all"), ("binding", "all")),
        ("exchange", "marker"),
    ]
    assert re.findall(r"depends_on = \[(.*)\]", text) == [
        *("rabbitmq_exchange.guard", "rabbitmq_exchange.all"),
        "rabbitmq_exchange.all, rabbitmq_queue.all",
        "rabbitmq_queue.all, rabbitmq_binding.all",
    ]
    assert text.count("prevent_destroy = true") == 1


def test_the_module_says_its_inputs() -> None:
    topology = Topology("shop", geometric(factor=60, levels=4, tick=1))
    text = export.as_terraform(topology, 'a"${b}')
    defaults = re.findall(r"^  default += (.*)$", text, re.M)
    assert defaults == ['"shop"', r'"a\"$${b}"', str(60**4 - 1)]
    assert f"condition     = var.max_delay <= {60**4 - 1}\n" in text


def test_the_command_prints_the_virtual_host_of_the_application(
    offline: Callable[..., Result],
) -> None:
    told = offline("export", "-f", "definitions", "-j", broker_url="amqp://guest@nowhere/v")
    found, topology = checked("export", told.stdout), Settings().topology
    assert found["fingerprint"] == topology.identity.fingerprint
    assert found["layout"] == topology.layout.name
    assert json.loads(found["text"]) == export.definitions(topology, "v")
