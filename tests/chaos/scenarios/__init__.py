"""The scenarios, a file for each kind of trouble; :data:`SCENARIOS` lists them by name."""

from __future__ import annotations

from typing import Final

from tests.chaos.scenario import Scenario
from tests.chaos.scenarios.clocks_off import ClocksOff
from tests.chaos.scenarios.connections import Connections, Tls
from tests.chaos.scenarios.freeze import Alarm, Freeze, RollingRestart
from tests.chaos.scenarios.full_destination import FullDestination
from tests.chaos.scenarios.host_away import HostAway
from tests.chaos.scenarios.node_crash import NodeCrash
from tests.chaos.scenarios.partition import Partition
from tests.chaos.scenarios.policies import GuardedPolicies, Policies
from tests.chaos.scenarios.processes_killed import ProcessesKilled
from tests.chaos.scenarios.quorum_lost import QuorumLost
from tests.chaos.scenarios.redis_away import RedisAway
from tests.chaos.scenarios.registry_away import RegistryAway
from tests.chaos.scenarios.schedules import Schedules

SCENARIOS: Final[dict[str, type[Scenario]]] = {
    each.name: each
    for each in (
        *(FullDestination, NodeCrash, HostAway, QuorumLost, Policies, GuardedPolicies),
        *(Freeze, RollingRestart, Alarm, ProcessesKilled, RedisAway, RegistryAway),
        *(Partition, ClocksOff, Connections, Tls, Schedules),
    )
}

#: A few of them, for a first look.
SHORT: Final[tuple[Scenario, ...]] = (
    FullDestination(),
    HostAway(),
    NodeCrash(tasks=1500, minutes=1.0),
)
