"""All formats of an export, by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.export.definitions import as_definitions
from celery_rabbitdelay.operations.export.dot import as_dot
from celery_rabbitdelay.operations.export.mermaid import as_mermaid
from celery_rabbitdelay.operations.export.svg import as_svg
from celery_rabbitdelay.operations.export.terraform import as_terraform

#: The function that writes each format, given the topology and the name of the virtual host.
FORMATS: Final[dict[str, Callable[[Topology, str], str]]] = {
    "terraform": as_terraform,
    "definitions": as_definitions,
    "mermaid": lambda topology, vhost: as_mermaid(topology),
    "dot": lambda topology, vhost: as_dot(topology),
    "svg": lambda topology, vhost: as_svg(topology),
}


def exported(topology: Topology, format_name: str, vhost: str = "/") -> str:
    """Return a topology as text.

    Args:
        topology: The topology.
        format_name: One of :data:`FORMATS`.
        vhost: The virtual host, which drawings leave out.
    """
    return FORMATS[format_name](topology, vhost)
