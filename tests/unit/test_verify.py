"""What ``verify`` concludes from an inventory, without a broker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import InvalidManagementURL
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.verify.amqp_probes import ClockProbe, check_clock
from celery_rabbitdelay.operations.verify.application import Application
from celery_rabbitdelay.operations.verify.broker import check_features, check_version
from celery_rabbitdelay.operations.verify.destinations import check_destinations
from celery_rabbitdelay.operations.verify.effective_policy import effective_policies
from celery_rabbitdelay.operations.verify.finding import Finding, merged, named
from celery_rabbitdelay.operations.verify.inventory import (
    FoundExchange,
    FoundQueue,
    Inventory,
    Node,
    Policy,
)
from celery_rabbitdelay.operations.verify.layout import check_layout
from celery_rabbitdelay.operations.verify.management_api import ManagementAPI, management_api_of
from celery_rabbitdelay.operations.verify.orphans import check_orphans
from celery_rabbitdelay.operations.verify.policies import check_policies
from celery_rabbitdelay.operations.verify.replicas import check_nodes, check_replicas

EMPTY = Inventory({}, {}, frozenset())

QUEUE = FoundQueue("rabbitdelay.hours.7", "quorum", {}, True, False, False, "a", ("a",), ("a",))


def sound() -> Inventory:
    """The inventory of a broker on which a topology is declared, and nothing else."""
    topology = Topology()
    found = {
        queue.name: QUEUE._replace(name=queue.name, arguments=queue.queue_arguments or {})
        for queue in topology.queues
    }
    exchanges = {
        each.name: FoundExchange(
            each.name, str(each.type), each.arguments or {}, True, False, False
        )
        for each in (*topology.exchanges, *topology.identity[1:])
    }
    return Inventory(found, exchanges, frozenset(topology.bindings))


def policy(definition: dict[str, Any], priority: int = 0, **others: Any) -> Policy:
    default = Policy("p", "", "queues", priority, definition, False)
    return default._replace(**others)


def in_effect(*policies: Policy, queue: FoundQueue = QUEUE) -> list[dict[str, Any]]:
    found = effective_policies(replace(EMPTY, policies=policies), queue)
    return [dict(each.definition) for each in found]


def test_nothing_is_wrong_with_a_sound_layout() -> None:
    assert list(check_layout(Application(Topology()), sound())) == []
    assert list(check_orphans(Topology(), sound(), lambda _: 0)) == []


@pytest.mark.parametrize(
    ("version", "codes"),
    [
        ("3.9.29", ["version-too-old"]),
        ("3.10.0", []),
        ("3.13.7", []),
        ("4.0.5", []),
        ("4.3.0", ["version-fault"]),
        ("4.3.2+1.g1234567", ["version-fault"]),
        ("4.3.3-rc.1", []),
        ("4.3.6", []),
        ("5.0", []),
    ],
)
def test_the_version_is_too_old_or_has_a_fault(version: str, codes: list[str]) -> None:
    assert [finding.code for finding in check_version(version)] == codes


def test_a_flag_that_is_not_needed_is_only_a_warning() -> None:
    flags = replace(EMPTY, disabled_flags=("stream_queue", "other"))
    assert [each.severity for each in check_features(flags)] == ["danger", "warning"]


def test_a_partition_is_a_danger() -> None:
    nodes = (Node("a", True, ("b",)), Node("b", True, ()))
    assert [each.code for each in check_nodes(replace(EMPTY, nodes=nodes))] == ["partition"]


@pytest.mark.parametrize(
    ("members", "online", "nodes", "codes"),
    [
        ("a", "a", "a", []),
        ("a", "a", "ab", ["replicas-few"]),
        ("abc", "abc", "abcde", []),
        ("abc", "ab", "abc", ["replica-offline"]),
        ("abc", "a", "abc", ["quorum-lost"]),
        ("ab", "a", "abc", ["quorum-lost", "replicas-few"]),
        ("abcde", "abc", "abcde", ["replica-offline"]),
        ("abcde", "ab", "abcde", ["quorum-lost"]),
        ("a", "", "", ["quorum-lost"]),
    ],
)
def test_replicas_are_counted(members: str, online: str, nodes: str, codes: list[str]) -> None:
    queue = QUEUE._replace(members=tuple(members), online=tuple(online))
    inventory = replace(
        EMPTY, queues={queue.name: queue}, nodes=tuple(Node(name, True, ()) for name in nodes)
    )
    assert [each.code for each in check_replicas(inventory, [queue.name])] == codes


def test_without_policies_none_is_in_effect() -> None:
    assert in_effect() == [{}]


def test_only_the_policy_of_the_highest_priority_is_in_effect() -> None:
    assert in_effect(policy({"expires": 1}, 5), policy({"max-length": 2}, 6)) == [{"max-length": 2}]


def test_of_several_policies_of_one_priority_each_may_be_in_effect() -> None:
    first, second = {"expires": 1}, {"max-length": 2}
    assert in_effect(policy(first), policy(second)) == [first, second]


def test_the_smaller_bound_is_in_effect_and_the_overflow_of_the_operator() -> None:
    own = policy({"max-length": 2, "overflow": "reject-publish", "expires": 9})
    operators = policy({"max-length": 3, "overflow": "drop-head", "expires": 1}, is_operator=True)
    assert in_effect(own, operators) == [{"max-length": 2, "overflow": "drop-head", "expires": 1}]


@pytest.mark.parametrize(
    ("apply_to", "pattern", "matches"),
    [
        ("all", "", True),
        ("queues", "^rabbitdelay", True),
        ("quorum_queues", r"hours\.7$", True),
        ("queues", "(?<name>unknown to Python", True),
        ("classic_queues", "", False),
        ("streams", "", False),
        ("exchanges", "", False),
        ("queues", "^hours", False),
    ],
)
def test_a_policy_matches_by_name_and_type(apply_to: str, pattern: str, matches: bool) -> None:
    found = in_effect(policy({"expires": 1}, apply_to=apply_to, pattern=pattern))
    assert found == [{"expires": 1} if matches else {}]


def test_what_the_broker_reports_is_taken_where_policies_cannot_be_seen() -> None:
    unseen = replace(EMPTY, policies=None, effective={QUEUE.name: {"expires": 1}})
    [found] = check_policies(
        replace(unseen, queues={QUEUE.name: QUEUE}), {QUEUE.name: "level"}, "rabbitdelay", "/"
    )
    assert found.what == "a policy or an operator policy sets expires to 1"


def test_a_classic_queue_of_the_levels_may_have_any_overflow_and_delivery_limit() -> None:
    queue = QUEUE._replace(type="classic", arguments={"x-dead-letter-exchange": "x"})
    bad = policy({"overflow": "drop-head", "delivery-limit": 1})
    inventory = replace(EMPTY, queues={queue.name: queue}, policies=(bad,))
    assert list(check_policies(inventory, {queue.name: "level"}, "rabbitdelay", "/")) == []


def test_orphans_are_told_from_other_queues_by_name_and_dead_lettering() -> None:
    waits = {"x-message-ttl": 1, "x-dead-letter-exchange": "rabbitdelay.days.x1"}
    names = {
        "rabbitdelay.weeks.1": waits,
        "rabbitdelay.weeks.x1.0.s3": waits,
        "rabbitdelay.reports.2024": {"x-message-ttl": 1, "x-dead-letter-exchange": "mine"},
        "rabbitdelay.eu.days.1": waits,
        "other.weeks.1": waits,
    }
    queues = {name: QUEUE._replace(name=name, arguments=names[name]) for name in names}
    counts = {"rabbitdelay.weeks.1": 5, "rabbitdelay.weeks.x1.0.s3": None}
    found = list(check_orphans(Topology(), replace(EMPTY, queues=queues), counts.__getitem__))
    assert [each.subjects[0].removeprefix("queue ") for each in found] == list(counts)
    assert [each.severity for each in found] == ["danger", "danger"]


def test_the_levels_of_another_prefix_that_begins_alike_are_no_orphans() -> None:
    other = Topology("rabbitdelay.eu")
    queues = {
        queue.name: QUEUE._replace(name=queue.name, arguments=queue.queue_arguments or {})
        for queue in other.queues
    }
    exchanges = {
        each.name: FoundExchange(each.name, "topic", {}, True, False, False)
        for each in (*other.exchanges, *other.identity[1:])
    }
    inventory = replace(EMPTY, queues=queues, exchanges=exchanges)
    assert list(check_orphans(Topology(), inventory, lambda _: 5)) == []


def test_queues_that_go_with_their_consumer_need_not_exist() -> None:
    passing = (Queue("a", exclusive=True), Queue("b", auto_delete=True))
    assert list(check_destinations(Application(Topology(), passing), sound())) == []


@pytest.mark.parametrize(
    ("at_least", "at_most", "difference"),
    [(-0.5, 0.6, 0.0), (3.0, 4.1, 3.0), (-4.1, -3.0, 3.0)],
)
def test_clocks_differ_by_the_least_that_is_possible(
    at_least: float, at_most: float, difference: float
) -> None:
    probe = ClockProbe(at_least, at_most)
    assert probe.difference == difference
    assert bool(list(check_clock(probe, Application(Topology())))) == (difference > 1)


def test_findings_that_differ_in_their_subjects_alone_are_one_and_the_worst_comes_first() -> None:
    note = Finding("note", "n", ("a",), "what", "consequence", "remedy")
    danger = note._replace(severity="danger", code="d")
    together = merged([note, danger, note._replace(subjects=("b",)), note])
    assert together == (danger, note._replace(subjects=("a", "b")))


def test_of_many_subjects_the_first_are_named() -> None:
    assert named(("a", "b", "c")) == "a, b, c"
    assert named(("a", "b", "c", "d", "e")) == "a, b, c and 2 more"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("http://guest:secret@host", "http://host:15672"),
        ("https://host", "https://host:15671"),
        ("http://u:p@[::1]:8080/path/", "http://[::1]:8080/path"),
    ],
)
def test_the_url_of_the_management_api_is_shown_without_the_password(
    given: str, shown: str
) -> None:
    assert ManagementAPI(given).url == shown


@pytest.mark.parametrize("url", ["", "host", "amqp://u:secret@host", "http://u:secret@host:x"])
def test_another_url_is_refused_without_telling_the_password(url: str) -> None:
    with pytest.raises(InvalidManagementURL) as refused:
        ManagementAPI(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("amqp://guest:guest@host:5673//", "http://host:15672"),
        ("amqp://u%40x:p%2F@host/v", "http://host:15672"),
        ("amqps://host", "https://host:15671"),
    ],
)
def test_by_default_the_api_is_at_the_broker_s_host(url: str, expected: str) -> None:
    assert management_api_of(Connection(url)).url == expected
