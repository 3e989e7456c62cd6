"""A topology as a Terraform module for the provider ``cyrilgdn/rabbitmq``.

The module has the inputs ``name`` (the prefix), ``vhost`` and ``max_delay``. What it makes stands
in its ``locals``, with the names behind the prefix; a resource of each kind makes all of them. The
file ``module.tf`` is the module with the names of values, as ``@name@``, in place of what differs.

An HCL string is a JSON string in which ``${`` and ``%{`` begin a template
(https://developer.hashicorp.com/terraform/language/expressions/strings).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any, Final

from celery_rabbitdelay.levels.delay import duration_text
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.export.definitions import as_setting, definitions

#: Arguments whose values are names.
_NAMES: Final = ("alternate-exchange", "x-dead-letter-exchange")


def as_terraform(topology: Topology, vhost: str = "/") -> str:
    """Return the text of a module, ``main.tf``.

    Args:
        topology: The topology; its prefix is the default of the input ``name``.
        vhost: The default of the input ``vhost``.
    """
    layout = topology.layout
    values = {
        "layout": layout.name,
        "zeros": layout.zeros,
        "capacity": duration_text(layout.capacity_ms),
        "prefix": _string(topology.prefix),
        "vhost": _string(vhost),
        "max_delay": _number(layout.capacity_ms),
        "setting": _value(as_setting(layout)),
        "locals": "\n".join(_locals(topology)),
    }
    template = files(__package__).joinpath("module.tf").read_text(encoding="utf-8")
    return re.sub("@([a-z_]+)@", lambda found: values[found[1]], template)


def _locals(topology: Topology) -> Iterator[str]:
    made = definitions(topology)

    def bare(name: str) -> str:
        return name.removeprefix(f"{topology.prefix}.")

    def arguments(entity: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: _Template(f"${{var.name}}.{bare(value)}") if key in _NAMES else value
            for key, value in entity["arguments"].items()
        }

    exchanges = {
        bare(each["name"]): {"type": each["type"], "arguments": arguments(each)}
        for each in made["exchanges"]
    }
    first, *_, last = exchanges
    yield "locals {"
    yield f"  guard  = {_value({'name': first, **exchanges.pop(first)})}"
    yield f"  marker = {_value({'name': last, **exchanges.pop(last)})}"
    yield ""
    yield from _map("exchanges", exchanges)
    yield ""
    yield from _map("queues", {bare(each["name"]): arguments(each) for each in made["queues"]})
    yield ""
    bindings = {}
    for each in made["bindings"]:
        source, target = bare(each["source"]), bare(each["destination"])
        bindings[f"{source} {each['routing_key']} {target}"] = {
            "source": source,
            "destination": target,
            "destination_type": each["destination_type"],
            "routing_key": each["routing_key"],
        }
    yield from _map("bindings", bindings)
    yield "}"


def _map(name: str, entries: Mapping[str, Any]) -> Iterator[str]:
    """Write a map with a line for each entry, aligned as ``terraform fmt`` does."""
    keys = [_string(key) for key in entries]
    width = max(map(len, keys))
    yield f"  {name} = {{"
    for key, value in zip(keys, entries.values(), strict=True):
        yield f"    {key.ljust(width)} = {_value(value)}"
    yield "  }"


class _Template(str):
    """A string in which ``${`` does begin a template."""

    __slots__ = ()


def _string(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return (
        quoted if isinstance(text, _Template) else quoted.replace("${", "$${").replace("%{", "%%{")
    )


def _number(length_ms: int) -> str:
    """Milliseconds as a number of seconds."""
    return f"{length_ms // 1000}.{length_ms % 1000:03}".rstrip("0").rstrip(".")


def _value(value: Any) -> str:
    """Write a value in one line."""
    match value:
        case str():
            return _string(value)
        case Mapping():
            pairs = (f"{_string(str(key))} = {_value(each)}" for key, each in value.items())
            return f"{{ {', '.join(pairs)} }}" if value else "{}"
        case list():
            return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value)  # numbers and null
