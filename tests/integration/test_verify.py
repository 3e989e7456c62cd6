"""``verify`` finds each fault that is planted on a real broker, and none on a sound one."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.exceptions import ManagementUnavailable
from celery_rabbitdelay.levels.layout import binary, custom
from celery_rabbitdelay.operations.export.definitions import definitions
from celery_rabbitdelay.operations.verify.findings import Finding
from celery_rabbitdelay.operations.verify.management import ManagementAPI
from celery_rabbitdelay.publishing.declaration import bind_destination, declare_destination
from celery_rabbitdelay.testing import RabbitMQServer
from tests.integration.conftest import LEVELS, SHORT
from tests.integration.faults import (
    FAULTS,
    GUARD,
    operator_policy_despite_the_guard,
    unbound_digit,
    without_queue,
)
from tests.integration.management import Place, codes_of, node, place, place_on, wait_until_managed

__all__ = ["node", "place"]


def test_nothing_is_found_on_a_sound_broker(place: Place) -> None:
    assert place.verify().findings == ()


@pytest.mark.parametrize(
    "settings",
    [
        Settings(prefix="clock"),
        Settings(prefix="skipping", layout=custom(LEVELS, zeros="skip"), shards=2),
        Settings(prefix="queueing", layout=custom(LEVELS, zeros="queue")),
        Settings(prefix="shop.eu", layout=binary(levels=6)),
    ],
    ids=lambda settings: settings.prefix,
)
def test_nothing_is_found_in_any_layout(place: Place, settings: Settings) -> None:
    declare_destination(place.connection, settings.topology, place.orders)
    for each in (settings, place.settings):
        place.settings = each
        assert place.verify().findings == ()


def test_nothing_is_found_where_the_exported_definitions_were_imported(place: Place) -> None:
    place.settings = Settings(prefix="imported", layout=SHORT, declare="never")
    topology = place.settings.topology
    place.post("definitions", place.name, **definitions(topology, place.name))
    bind_destination(place.connection, topology, "orders")
    assert place.verify().findings == ()


def test_queues_that_go_with_their_consumer_need_not_exist(place: Place) -> None:
    place.destinations += [Queue("a", exclusive=True), Queue("b", auto_delete=True)]
    assert place.verify().findings == ()


def test_nothing_is_found_if_the_recommended_policy_keeps_another_one_away(place: Place) -> None:
    place.policy(**GUARD)
    place.policy(".*", 999, message_ttl=1000, max_length=10, expires=60_000, overflow="drop-head")
    assert {finding.subjects for finding in place.verify().findings} == {("queue orders",)}


def test_nothing_is_found_if_a_policy_is_harmless(place: Place) -> None:
    # No level waits longer; where there is an argument, that of a policy does not count.
    place.policy(r"^shop\.(seconds|ms)", message_ttl=5000, dead_letter_exchange="amq.fanout")
    assert place.verify().findings == ()


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_found_alone(place: Place, fault: str) -> None:
    plant, severity, codes = FAULTS[fault]
    plant(place)
    report = place.verify_until(codes)
    assert report.findings[0].severity == severity
    assert all(each.consequence and each.remedy for each in report.findings)
    texts = [text for each in report.findings for text in each[3:]]
    assert not any("{policy" in text or "{difference" in text for text in texts)


def finding(place: Place) -> Finding:
    [found] = place.verify().findings
    return found


def test_a_policy_is_one_finding_with_all_its_queues(place: Place) -> None:
    place.policy(r"^shop\.ms", max_length=5)
    found = finding(place)
    assert found.subjects == tuple(f"queue shop.ms.{digit}00" for digit in range(1, 10))
    assert r"'^shop\.ms'" in found.what
    assert "--priority 1000" in found.remedy


def test_the_remedy_outranks_the_policy(place: Place) -> None:
    place.policy("ms", 5000, max_length=5)
    assert "--priority 5001" in finding(place).remedy


def test_the_remedy_works(place: Place) -> None:
    place.policy("ms", max_length=5)
    command = finding(place).remedy.partition(";")[0]
    assert command.startswith("rabbitmqctl set_policy -p ")
    place.node.ctl(*shlex.split(command)[1:])
    assert place.verify().findings == ()


def test_an_operator_policy_is_named(place: Place) -> None:
    operator_policy_despite_the_guard(place)
    assert "operator policy" in finding(place).what
    assert "an operator policy has to leave these queues out" in finding(place).remedy


def test_the_smaller_value_of_policy_and_operator_policy_counts(place: Place) -> None:
    place.policy(r"\.seconds\.5", message_ttl=60_000)
    place.policy(r"\.seconds\.5", kind="operator-policies", message_ttl=4000)
    assert "message-ttl to 4000" in finding(place).what


def test_a_destination_that_is_known_to_refuse_is_no_fault(place: Place) -> None:
    place.policy("orders", max_length=5, overflow="reject-publish")
    place.settings = replace(place.settings, may_refuse=["ord*"])
    assert place.verify().findings == ()


def test_classic_levels_are_a_warning(node: RabbitMQServer) -> None:
    with place_on(node, "classic") as place:
        assert codes_of(place.verify()) == {"classic-levels"}


def test_nothing_on_the_broker_is_changed(place: Place) -> None:
    def everything() -> Any:
        lists = ("exchanges", "bindings", "policies")
        queues = place.api.get("queues", place.name, disable_stats="true")
        names = sorted(queue["name"] for queue in queues)
        return names, *(place.api.get(each, place.name) for each in lists)

    without_queue(place)
    unbound_digit(place)
    before = everything()
    place.verify()
    assert everything() == before


@pytest.mark.parametrize(
    ("permission", "configure", "write", "read"),
    [("configure", "", ".*", ".*"), ("write", ".*", "^amq", ".*"), ("read", ".*", ".*", "^amq")],
)
def test_each_permission_is_named_with_all_that_lacks_it(
    place: Place, permission: str, configure: str, write: str, read: str
) -> None:
    place.user(configure, write, read)
    found = {each.what.split()[-1]: set(each.subjects) for each in place.verify().findings}
    assert set(found) == {permission}
    everything = {f"exchange {each.name}" for each in place.topology.exchanges}
    queues = {f"queue {each.name}" for each in (*place.topology.queues, place.orders)}
    identity = {f"exchange {each.name}" for each in place.topology.identity[1:]}
    assert (
        found[permission]
        == {
            "configure": everything | queues | identity,
            "write": everything - {"exchange shop.meditated"} | {"queue orders"},
            "read": {"exchange shop.delivery", "queue shop.checkin", "queue shop.distribution"},
        }[permission]
    )


def test_a_user_who_may_not_see_everything_is_an_error(place: Place) -> None:
    place.put("users", "little", password="secret", tags="management")
    place.put("permissions", place.name, "little", configure=".*", write=".*", read=".*")
    place.api = ManagementAPI(place.node.management_url.replace("guest:guest", "little:secret"))
    with pytest.raises(ManagementUnavailable) as refused:
        place.verify()
    place.delete("users", "little")
    assert refused.value.status == 401
    assert refused.value.reason.startswith(("nodes: 401", "feature-flags: 401"))
    assert "a user with the tag 'monitoring'" in str(refused.value)


def test_a_feature_flag_that_dead_lettering_needs_is_missed(broker_root: Path | None) -> None:
    class Node(RabbitMQServer):
        def _environment(self) -> dict[str, str]:
            return {**super()._environment(), "RABBITMQ_FEATURE_FLAGS": "quorum_queue"}

    with ExitStack() as stack:
        node = stack.enter_context(Node(broker_root, management=True))
        with Connection(node.url) as connection:
            connection.connect()
            version = connection.connection.server_properties["version"]
        if not version.startswith("3.10."):
            pytest.skip("later versions require the flag")
        wait_until_managed(node)
        report = stack.enter_context(place_on(node)).verify()
        assert "feature flag stream_queue" in report.findings[0].subjects
        assert report.findings[0].severity == "danger"
        assert codes_of(report) == {"feature-flag-disabled"}
