"""What former generations of the levels have on the broker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from celery_rabbitdelay.levels.generation import GENERATIONS
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.generations import migrate_remedy
from celery_rabbitdelay.operations.verify.finding import Finding


def check_generations(topology: Topology, former: Mapping[int, int]) -> Iterator[Finding]:
    """Find former generations that are declared.

    Args:
        topology: The present topology.
        former: What :func:`.former_generations` has returned.
    """
    for number, messages in former.items():
        names = GENERATIONS[number].name_prefix(topology.prefix)
        yield Finding(
            "note",
            "former-generation",
            (names,),
            f"generation {number} of the levels is declared beside the present one, "
            f"{topology.generation.number}; {messages:,} messages wait in it",
            "they arrive when they are due; its queues cost the broker memory",
            migrate_remedy(number),
        )
