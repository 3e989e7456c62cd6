"""``celery rabbitdelay export``: a topology as Terraform, or as a definitions file.

``rabbitmqctl import_definitions``, the management page and ``load_definitions`` of
``rabbitmq.conf`` read a definitions file (https://www.rabbitmq.com/docs/definitions). The Terraform
module is for the provider ``cyrilgdn/rabbitmq``; its template, ``module.tf``, has placeholders such
as ``@name@``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Final

import click

from celery_rabbitdelay.command import shared
from celery_rabbitdelay.levels.delay import duration_text
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.inventory import described
from celery_rabbitdelay.operations.management import Json


def _seconds(length_ms: int) -> float:
    return length_ms // 1000 if length_ms % 1000 == 0 else length_ms / 1000


def definitions(topology: Topology, vhost: str = "/") -> dict[str, list[Json]]:
    """Return the exchanges, queues and bindings that ``declare`` creates.

    The guard, which refuses other layouts under the prefix, is the first exchange. The marker,
    which shows that the topology is complete, is the last one.

    The virtual host has to exist, and is not in the file: importing it would reset its description,
    its tags and its default queue type.

    Args:
        topology: The topology.
        vhost: The virtual host of all entities.
    """
    queues = (*topology.queues, topology.probe)
    return {
        "exchanges": [{**described(each), "vhost": vhost} for each in topology.all_exchanges],
        "queues": [{**described(each), "vhost": vhost} for each in queues],
        "bindings": [
            {
                "source": each.source,
                "vhost": vhost,
                "destination": each.target,
                "destination_type": "exchange" if each.target_is_exchange else "queue",
                "routing_key": each.pattern,
                "arguments": {},
            }
            for each in (*topology.bindings, topology.probe_binding)
        ],
    }


#: A placeholder for the prefix, which is an input of the Terraform module.
_PREFIX: Final = "@name@"


def as_terraform(topology: Topology, vhost: str = "/") -> str:
    """Return the text of a Terraform module, ``main.tf``.

    The module's inputs are ``name``, ``vhost`` and ``max_delay``. Its ``locals`` hold the
    exchanges, queues and bindings as JSON, which is valid HCL; their names lack the prefix.

    Args:
        topology: The topology; its prefix is the default of the input ``name``.
        vhost: The default of the input ``vhost``.
    """
    layout, made = topology.layout, definitions(replace(topology, prefix=_PREFIX))
    behind = slice(len(f"{_PREFIX}."), None)
    guard, *exchanges, marker = (
        {"name": each["name"][behind], "type": each["type"], "arguments": each["arguments"]}
        for each in made["exchanges"]
    )
    bindings = [
        {
            "source": each["source"][behind],
            "destination": each["destination"][behind],
            "destination_type": each["destination_type"],
            "routing_key": each["routing_key"],
        }
        for each in made["bindings"]
    ]
    values = {
        "layout": layout.name,
        "zeros": layout.zeros,
        "capacity": duration_text(layout.capacity_ms),
        "prefix": _hcl(topology.prefix),
        "vhost": _hcl(vhost),
        "max_delay": _hcl(_seconds(layout.capacity_ms)),
        "guard": _hcl(guard),
        "marker": _hcl(marker),
        "exchanges": _table({each["name"]: each for each in exchanges}),
        "queues": _table({each["name"][behind]: each["arguments"] for each in made["queues"]}),
        "bindings": _table({" ".join(each.values()): each for each in bindings}),
    }
    template = files(__package__).joinpath("module.tf").read_text(encoding="utf-8")
    return re.sub("@([a-z_]+)@", lambda found: values[found[1]], template)


def _hcl(value: object) -> str:
    """Write a value for Terraform; escape ``${`` and ``%{``, which begin a template there."""
    text = json.dumps(value, ensure_ascii=False).replace("${", "$${").replace("%{", "%%{")
    return text.replace(_PREFIX, "${var.name}")


def _table(entries: Mapping[str, object]) -> str:
    lines = ",\n".join(f"    {_hcl(key)}: {_hcl(value)}" for key, value in entries.items())
    return f"{{\n{lines}\n  }}"


@shared.command()
@click.option(
    "-f",
    "--format",
    "format_name",
    type=click.Choice(("terraform", "definitions")),
    required=True,
    help="A Terraform module, or a definitions file for RabbitMQ.",
)
@click.option("--vhost", help="The virtual host; by default the application's.")
@shared.topology_options()
def export(format_name: str, vhost: str | None, **options: object) -> None:
    """Print the topology as Terraform or as a definitions file. No broker is contacted."""
    topology = shared.topology(options)
    host = shared.app().connection_for_write().virtual_host or "/" if vhost is None else vhost
    if format_name == "terraform":
        text = as_terraform(topology, host).removesuffix("\n")
    else:
        text = json.dumps(definitions(topology, host), indent=2)
    found = {
        "format": format_name,
        "prefix": topology.prefix,
        "vhost": host,
        "fingerprint": topology.identity.fingerprint,
        "layout": topology.layout.name,
        "capacity_ms": topology.layout.capacity_ms,
        "text": text,
    }
    shared.answer(found, [text])
