"""The scenarios, a file for each kind of trouble; :data:`SCENARIOS` lists them by name."""

from __future__ import annotations

from typing import Final

from tests.chaos.scenario import Scenario
from tests.chaos.scenarios.full_destination import FullDestination
from tests.chaos.scenarios.host_away import HostAway
from tests.chaos.scenarios.node_crash import NodeCrash
from tests.chaos.scenarios.policies import Policies
from tests.chaos.scenarios.quorum_lost import QuorumLost

__all__ = ["SCENARIOS"]

SCENARIOS: Final[dict[str, type[Scenario]]] = {
    each.name: each for each in (FullDestination, NodeCrash, HostAway, QuorumLost, Policies)
}
