"""What to do when RabbitMQ refuses to declare a topology, told from its answer. Pure.

The guard refuses another fingerprint before anything else is declared, and the answer then has both
fingerprints, unless the prefix is long: RabbitMQ cuts the answer after 255 bytes. Any other refusal
is about one exchange or queue that somebody has declared otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from celery_rabbitdelay.exceptions import LayoutConflict
from celery_rabbitdelay.levels.topology import Topology

#: Layout, queue type, shards and arguments in a fingerprint; see :meth:`.Topology.identity`.
_FINGERPRINT: Final = re.compile(
    r"(?P<layout>.+)-(?P<queue_type>quorum|classic)(-s(?P<shards>\d+))?-(?P<arguments>v.+)"
)

#: In what the levels may differ if the fingerprint on the broker is unknown.
ANY_SETTING: Final = (
    "rabbitdelay_layout, rabbitdelay_tick, rabbitdelay_queue_type or rabbitdelay_shards, or "
    "another version of celery_rabbitdelay has declared them"
)


def conflict_with(topology: Topology, reply: str) -> LayoutConflict:
    """Return the error for a refusal, with advice that fits it.

    Args:
        topology: The topology that was to be declared.
        reply: What the broker answered.
    """
    if not _is_about_guard(topology, reply):
        advice = (
            "an exchange or queue exists with other arguments than this version of "
            "celery_rabbitdelay gives it: somebody has declared it by other means. Delete it once "
            "it is empty, and declare the levels again; `celery rabbitdelay verify` lists all "
            "that differ"
        )
        return LayoutConflict(topology.prefix, reply, advice)
    here, there = _parts(topology.identity.fingerprint), _parts(_declared(topology, reply))
    differing = list(_differing(here, there))
    if there["layout"] and not differing and here["arguments"] != there["arguments"]:
        advice = (
            f"the settings are the same, but another version of celery_rabbitdelay has declared "
            f"the levels with other arguments ({there['arguments']}, here {here['arguments']}). "
            "Run the version that has declared them; or give this one another rabbitdelay_prefix, "
            "and move what waits with `celery rabbitdelay migrate`"
        )
    else:
        names = "; ".join(differing) or ANY_SETTING
        advice = (
            f"the levels there differ in {names}. Restore the value with which they were "
            "declared; or use another rabbitdelay_prefix for these, and move what waits with "
            "`celery rabbitdelay migrate`; or, once no message waits in them any more, remove them "
            "with `celery rabbitdelay delete`, or celery_rabbitdelay.kombu.delete"
        )
    return LayoutConflict(topology.prefix, reply, advice)


def _is_about_guard(topology: Topology, reply: str) -> bool:
    """Return whether the answer is about the guard, whose name may be cut off at the end."""
    named = re.search(r"for exchange '([^']*)('?)", reply)
    if named is None:
        return False
    name, end = named.groups()
    guard = topology.identity.guard.name
    return bool(name == guard if end else guard.startswith(name))


def _declared(topology: Topology, reply: str) -> str:
    """Return the fingerprint of what is declared; empty if the answer does not have all of it."""
    start = re.escape(f"'{topology.identity.guard.name}.")
    found = set(re.findall(rf"{start}([A-Za-z0-9_.-]+)'", reply))
    others = found - {topology.identity.fingerprint}
    return others.pop() if len(others) == 1 else ""


def _parts(fingerprint: str) -> dict[str, str]:
    found = _FINGERPRINT.fullmatch(fingerprint)
    parts = found.groupdict() if found else {}
    names = ("layout", "queue_type", "shards", "arguments")
    return {name: parts.get(name) or ("1" if name == "shards" else "") for name in names}


def _differing(here: dict[str, str], there: dict[str, str]) -> Iterator[str]:
    if not there["layout"]:
        return  # it is unknown, or no fingerprint
    if here["layout"] != there["layout"]:
        yield (
            f"rabbitdelay_layout or rabbitdelay_tick ({there['layout']} there, "
            f"{here['layout']} here)"
        )
    for name in ("queue_type", "shards"):
        if here[name] != there[name]:
            yield f"rabbitdelay_{name} ({there[name]} there, {here[name]} here)"
