"""A topology in other formats has everything that ``declare`` makes, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.command.declare import FORMATS
from celery_rabbitdelay.kombu import Layout, Topology, binary, clock, custom, geometric
from celery_rabbitdelay.levels.layout import Zeros
from celery_rabbitdelay.operations.export import definitions as export
from celery_rabbitdelay.operations.export.terraform import as_terraform
from tests.json_schemas import checked
from tests.unit.declaring_model import DeclaringModel
from tests.unit.strategies import layouts
from tests.unit.terraform_model import Module

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


def declared(exchanges: Any, queues: Any, bindings: Any) -> tuple[Any, ...]:
    """What an export has, as the model notes what ``declare`` makes; none of it twice."""
    keys = ("source", "routing_key", "destination", "destination_type")
    found: tuple[Any, ...] = (
        {each["name"]: (each["type"], *_flags(each), each["arguments"]) for each in exchanges},
        {each["name"]: (*_flags(each), each["arguments"]) for each in queues},
        {tuple(each[key] for key in keys) for each in bindings},
    )
    assert [*map(len, found)] == [len(exchanges), len(queues), len(bindings)]
    return found


def _flags(each: dict[str, Any]) -> tuple[bool, bool]:
    return each["durable"], each["auto_delete"]


@pytest.mark.parametrize("layout", SOME)
def test_the_terraform_module_makes_what_declare_makes(layout: Layout) -> None:
    topology = Topology("shop.delay", layout)
    module = Module(as_terraform(topology), name="other")
    made = DeclaringModel(replace(topology, prefix="other"))
    exchanges, queues = (
        [
            {**each, **setting}
            for each in module.resources(f"rabbitmq_{kind}")
            for setting in each["settings"]
        ]
        for kind in ("exchange", "queue")
    )
    assert {each["vhost"] for each in exchanges} == {"/"}
    queues = [{**each, "arguments": json.loads(each["arguments_json"])} for each in queues]
    found = declared(exchanges, queues, module.resources("rabbitmq_binding"))
    assert found == (made.exchanges, made.queues, made.bindings)


@pytest.mark.parametrize("layout", SOME)
def test_the_definitions_have_what_declare_makes(layout: Layout) -> None:
    topology = Topology("shop", layout, "classic", 2)
    found, made = export.definitions(topology, "v"), DeclaringModel(topology)
    kinds = (found[kind] for kind in ("exchanges", "queues", "bindings"))
    assert declared(*kinds) == (made.exchanges, made.queues, made.bindings)
    assert {each["vhost"] for kind in found.values() for each in kind} == {"v"}


def test_the_marker_comes_last_and_queues_are_never_destroyed() -> None:
    text = as_terraform(Topology(layout=binary(levels=2)))
    order = Module(text).order()
    assert order["rabbitmq_exchange.all"] == ["rabbitmq_exchange.guard"]
    assert order["rabbitmq_queue.all"] == ["rabbitmq_exchange.all"]
    assert order["rabbitmq_binding.all"] == ["rabbitmq_exchange.all", "rabbitmq_queue.all"]
    assert order["rabbitmq_exchange.marker"] == ["rabbitmq_queue.all", "rabbitmq_binding.all"]
    (lifecycle,) = [each["lifecycle"] for each in Module(text).resources("rabbitmq_queue")[:1]]
    assert lifecycle == [{"prevent_destroy": True}]


def test_the_module_says_its_inputs_and_the_setting_of_the_applications() -> None:
    topology = Topology("shop", geometric(factor=60, levels=4, tick=1))
    module = Module(as_terraform(topology, 'a"${b}'))
    defaults = {name: each["default"] for name, each in module.variables.items()}
    assert defaults == {"name": "shop", "vhost": 'a"$${b}', "max_delay": 60**4 - 1}
    (condition,) = module.variables["max_delay"]["validation"]
    assert condition["condition"] == f"${{var.max_delay <= {60**4 - 1}}}"
    (provider,) = module.settings["required_providers"]
    assert provider["rabbitmq"]["source"] == "cyrilgdn/rabbitmq"
    assert Settings(layout=module.output["layout"]["value"]).topology.layout == topology.layout


@given(layouts)
def test_a_layout_is_made_again_from_its_setting(layout: Layout) -> None:
    setting = json.loads(json.dumps(export.as_setting(layout)))
    assert Settings(layout=setting).topology.layout == layout


def test_a_layout_that_only_python_can_make_has_no_setting() -> None:
    odd = Layout("mine", binary(levels=2).levels)
    assert export.as_setting(odd) is None
    assert export.as_setting(Layout("clock", clock().levels[1:])) is None
    assert Module(as_terraform(Topology(layout=odd))).output["layout"]["value"] is None


@given(layouts, st.data())
@settings(max_examples=50)
def test_a_cut_layout_is_the_smallest_that_holds_the_delay(layout: Layout, data: Any) -> None:
    max_ms = data.draw(st.integers(0, layout.capacity_ms))
    shorter = export.cut(layout, max_ms / 1000)
    assert shorter.levels == layout.levels[len(layout.levels) - len(shorter.levels) :]
    assert shorter.zeros == layout.zeros
    assert shorter.capacity_ms >= max_ms
    if len(shorter.levels) > 1:
        assert custom(as_setting_levels(shorter)[1:]).capacity_ms < max_ms


def as_setting_levels(layout: Layout) -> list[Any]:
    return [(each.unit, each.base, each.place_ms / 1000) for each in layout.levels]


@pytest.mark.parametrize("layout", SOME)
def test_the_flow_chart_shows_every_level_and_where_it_leads(layout: Layout) -> None:
    topology = Topology("shop", layout)
    front, title, end, kind, *lines = export.as_mermaid(topology).splitlines()
    assert (front, end, kind) == ("---", "---", "flowchart LR")
    assert title.startswith('title: "shop: ')
    node = re.compile(r'  (\w+)(?:\(\[|\{\{|\[\[|\[\()"[^"]+"(?:\]\)|\}\}|\]\]|\)\])')
    arrow = re.compile(r'  (\w+) (-->|==>|-\.->)(?:\|"([^"|]+)"\|)? (\w+)')
    nodes = [found[1] for line in lines if (found := node.fullmatch(line))]
    arrows = [found.groups() for line in lines if (found := arrow.fullmatch(line))]
    assert len(nodes) + len(arrows) == len(lines)
    assert {name for source, _, _, target in arrows for name in (source, target)} == set(nodes)
    # Each level has an exchange and queues; seven nodes stand around them.
    assert len(set(nodes)) == len(nodes) == 2 * len(layout.levels) + 7


def test_the_command_writes_every_format(offline: Callable[..., Result], tmp_path: Path) -> None:
    for name in FORMATS:
        told = offline("export", "--format", name, "--prefix", "shop", "--layout", "binary")
        assert told.stdout == FORMATS[name](Topology("shop", binary()), "/")
        path = tmp_path / name
        options = ("-f", name, "-o", str(path), "--prefix", "shop", "--layout", "binary", "-j")
        found = checked("export", offline("export", *options).stdout)
        assert (path.read_text(), found["output"]) == (told.stdout, str(path))
        assert found["text"] is None


def test_the_command_leaves_out_levels_that_no_delay_needs(offline: Callable[..., Result]) -> None:
    url = "amqp://guest@nowhere/v"
    told = offline("export", "-f", "definitions", "--max-delay", "1d", "-j", broker_url=url)
    found = checked("export", told.stdout)
    assert "The applications need rabbitdelay_layout = " in told.stderr
    cut_down = Settings(layout=found["layout"]).topology
    assert cut_down.identity.fingerprint == found["fingerprint"]
    # The virtual host is that of the application.
    assert json.loads(found["text"]) == export.definitions(cut_down, "v")
    assert [level.name for level in cut_down.layout.levels] == [
        *("days.x1", "hours.x1", "minutes.x1", "seconds.x1", "ms.x100"),
    ]
