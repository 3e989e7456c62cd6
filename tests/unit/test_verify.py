"""What ``verify`` concludes from an inventory, without a broker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.levels.entities import Binding
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.verify import checks
from celery_rabbitdelay.operations.verify.findings import FAULTS, Severity, findings_of
from celery_rabbitdelay.operations.verify.management import (
    Inventory,
    management_api_of,
)
from celery_rabbitdelay.operations.verify.policies import check_policies, effective_policies

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "command_line.md"

HOURS = "rabbitdelay.hours.7"

EMPTY = Inventory(version="4.0.5")


def queue_of(name: str, **others: Any) -> dict[str, Any]:
    found = {"name": name, "type": "quorum", "durable": True, "auto_delete": False, "node": "a"}
    return {**found, "arguments": {}, "members": ["a"], "online": ["a"], **others}


def sound(topology: Topology) -> Inventory:
    """The inventory of a broker on which a topology is declared, and nothing else."""
    flags = {"durable": True, "auto_delete": False, "internal": False}
    queues = [queue_of(each.name, arguments=each.queue_arguments) for each in topology.queues]
    exchanges = {
        each.name: {
            **flags,
            "name": each.name,
            "type": each.type,
            "arguments": each.arguments or {},
        }
        for each in (*topology.exchanges, *topology.identity[1:])
    }
    bindings = frozenset(topology.bindings)
    return Inventory("4.0.5", {each["name"]: each for each in queues}, exchanges, bindings)


def policy(definition: dict[str, Any], priority: int = 0, **others: Any) -> dict[str, Any]:
    found = {"kind": "policy", "name": "p", "pattern": "", "apply-to": "queues"}
    return {**found, "priority": priority, "definition": definition, **others}


def in_effect(*policies: dict[str, Any]) -> list[dict[str, Any]]:
    found = EMPTY._replace(queues={HOURS: queue_of(HOURS)}, policies=policies)
    return [
        {key: value for key, (value, _) in effective.items()}
        for effective in effective_policies(found, HOURS)
    ]


def test_the_reference_has_every_code() -> None:
    section = REFERENCE.read_text().partition("## `verify`")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[a-z].*?) \| (\w+) \|", section, re.MULTILINE)
    told = {code: severity for codes, severity in rows for code in re.findall(r"`(.+?)`", codes)}
    assert told == {code: fault.severity for code, fault in FAULTS.items()}


def test_each_command_of_a_way_out_stands_in_backticks() -> None:
    # Those are run as they are printed, by tests/integration/test_verify.py.
    for code, fault in FAULTS.items():
        text = re.sub("`[^`]+`", "", fault.remedy)
        assert not re.search("rabbitmqctl|rabbitmq-|celery ", text), code


def test_nothing_is_wrong_with_a_sound_layout() -> None:
    settings = Settings()
    inventory = sound(settings.topology)
    assert list(checks.check_broker(settings, inventory)) == []
    assert list(checks.check_entities(settings, inventory)) == []
    assert list(checks.check_bindings(settings.topology, inventory)) == []
    assert list(checks.check_orphans(settings.topology, inventory, lambda _: 0)) == []


@pytest.mark.parametrize(
    ("source", "pattern", "target", "is_found"),
    [
        ("rabbitdelay.delivery", "#", "copies", True),
        ("rabbitdelay.delivery", "#.orders", "orders", True),
        ("amq.topic", "#", HOURS, True),
        ("amq.topic", "#", "orders", False),
        # As ours: of a destination; of one of a layout with fewer levels, which matches nothing.
        ("rabbitdelay.delivery", "*.*.*.*.*.*.*.*.orders", "orders", False),
        ("rabbitdelay.delivery", "*.*.orders", "orders", False),
    ],
)
def test_a_binding_that_lets_tasks_out_or_strangers_in_is_found(
    source: str, pattern: str, target: str, is_found: bool
) -> None:
    inventory, topology = sound(Settings().topology), Settings().topology
    more = inventory._replace(bindings=inventory.bindings | {Binding(source, pattern, target)})
    found = [code for code, *_ in checks.check_bindings(topology, more)]
    assert found == ["binding-additional"] * is_found


@pytest.mark.parametrize(
    ("version", "codes"),
    [
        ("3.9.29", ["version-too-old"]),
        ("3.10.0", []),
        ("4.3.0", ["version-fault"]),
        ("4.3.2+1.g1234567", ["version-fault"]),
        ("4.3.3-rc.1", []),
        ("5.0", []),
    ],
)
def test_the_version_is_too_old_or_has_a_fault(version: str, codes: list[str]) -> None:
    found = checks.check_broker(Settings(), Inventory(version=version))
    assert [code for code, *_ in found] == codes
    flagged = Inventory(version=version, disabled_flags=frozenset({"stream_queue", "others"}))
    found = checks.check_broker(Settings(), flagged)
    assert [code for code, *_ in found] == [*codes, "feature-flag-disabled"]


@pytest.mark.parametrize(
    ("members", "online", "nodes", "codes"),
    [
        ("a", "a", "ab", ["replicas-few"]),
        ("abc", "abc", "abcde", []),
        ("abc", "ab", "abc", ["replica-offline"]),
        ("ab", "a", "abc", ["quorum-lost", "replicas-few"]),
        ("abcde", "abc", "abcde", ["replica-offline"]),
        ("abcde", "ab", "abcde", ["quorum-lost"]),
        ("a", "", "", ["quorum-lost"]),
    ],
)
def test_replicas_are_counted(members: str, online: str, nodes: str, codes: list[str]) -> None:
    queue = queue_of(HOURS, members=list(members), online=list(online))
    inventory = EMPTY._replace(queues={HOURS: queue}, nodes=dict.fromkeys(nodes, True))
    assert [code for code, *_ in checks.check_replicas(inventory, [HOURS])] == codes


def test_replicas_are_added_on_nodes_that_run() -> None:
    inventory = EMPTY._replace(
        queues={HOURS: queue_of(HOURS)},
        nodes={"a": True, "b": False, "c": True, "d": True, "e": True},
    )
    ((_, _, told),) = checks.check_replicas(inventory, [HOURS])
    assert told["commands"] == "`rabbitmq-queues grow c all`, `rabbitmq-queues grow d all`"


@pytest.mark.parametrize(
    ("policies", "effective"),
    [
        ([], [{}]),
        # The highest priority alone; of one priority, each may be in effect.
        ([policy({"expires": 1}, 5), policy({"max-length": 2}, 6)], [{"max-length": 2}]),
        ([policy({"expires": 1}), policy({"max-length": 2})], [{"expires": 1}, {"max-length": 2}]),
        # The smaller bound, and the overflow of the operator.
        (
            [
                policy({"max-length": 2, "overflow": "reject-publish", "expires": 9}),
                policy(
                    {"max-length": 3, "overflow": "drop-head", "expires": 1}, kind="operator policy"
                ),
            ],
            [{"max-length": 2, "overflow": "drop-head", "expires": 1}],
        ),
    ],
)
def test_of_several_policies_some_are_in_effect(policies: Any, effective: Any) -> None:
    assert in_effect(*policies) == effective


@pytest.mark.parametrize(
    ("apply_to", "pattern", "matches"),
    [
        ("all", "^rabbitdelay", True),
        ("quorum_queues", r"hours\.7$", True),
        ("queues", "(?<name>unknown to Python", True),
        ("classic_queues", "", False),
        ("exchanges", "", False),
        ("queues", "^hours", False),
    ],
)
def test_a_policy_matches_by_name_and_type(apply_to: str, pattern: str, matches: bool) -> None:
    found = in_effect({**policy({"expires": 1}, pattern=pattern), "apply-to": apply_to})
    assert found == [{"expires": 1} if matches else {}]


def test_a_classic_queue_of_the_levels_may_have_any_overflow_and_delivery_limit() -> None:
    queue = queue_of(HOURS, type="classic", arguments={"x-dead-letter-exchange": "x"})
    bad = policy({"overflow": "drop-head", "delivery-limit": 1})
    inventory = EMPTY._replace(queues={HOURS: queue}, policies=(bad,))
    assert list(check_policies(Topology(), inventory, (), "/")) == []


def test_the_remedy_outranks_the_policy() -> None:
    policies = (policy({"expires": 1}, 5000),)
    inventory = EMPTY._replace(queues={HOURS: queue_of(HOURS)}, policies=policies)
    [(code, _, told)] = check_policies(Topology(), inventory, (), "/")
    assert code == "policy-expires"
    assert " --priority 5001 " in str(told["guard"])


def test_orphans_are_told_from_other_queues_by_name_and_dead_lettering() -> None:
    waits = {"x-message-ttl": 1, "x-dead-letter-exchange": "rabbitdelay.days.x1"}
    names = {
        "rabbitdelay.weeks.1": waits,
        "rabbitdelay.weeks.x1.0.s3": waits,
        "rabbitdelay.weeks.2": waits,
        "rabbitdelay.reports.2024": {"x-message-ttl": 1, "x-dead-letter-exchange": "mine"},
        "rabbitdelay.eu.days.1": waits,
        "other.weeks.1": waits,
    }
    queues = {name: queue_of(name, arguments=own) for name, own in names.items()}
    counts = {"rabbitdelay.weeks.1": 5, "rabbitdelay.weeks.x1.0.s3": None, "rabbitdelay.weeks.2": 0}
    found = list(
        checks.check_orphans(Topology(), EMPTY._replace(queues=queues), counts.__getitem__)
    )
    assert [(code, subject.removeprefix("queue ")) for code, subject, _ in found] == [
        ("orphan", "rabbitdelay.weeks.1"),
        ("orphan", "rabbitdelay.weeks.x1.0.s3"),
        ("orphan-empty", "rabbitdelay.weeks.2"),
    ]


def test_queues_that_differ_by_the_type_of_the_virtual_host_are_the_same() -> None:
    inventory = EMPTY._replace(queues={"q": queue_of("q", arguments={"x-queue-type": "quorum"})})
    settings = Settings()
    assert list(checks.check_destinations(settings, [Queue("q")], inventory)) == []
    [(code, *_)] = checks.check_destinations(settings, [Queue("q", max_length=5)], inventory)
    assert code == "destination-differs"


@pytest.mark.parametrize(
    ("ahead", "text"),
    [(0.9, None), (3.4, "at least 3 s ahead of"), (-3.4, "at least 3 s behind")],
)
def test_clocks_that_differ_by_more_than_workers_tolerate(ahead: float, text: str | None) -> None:
    inventory = EMPTY._replace(clock_ahead=ahead)
    found = findings_of(checks.check_broker(Settings(early_tolerance=1.0), inventory))
    assert [text in each.what for each in found if text] == [True] * bool(text)
    assert bool(found) == bool(text)


def test_findings_that_differ_in_their_subjects_alone_are_one_and_the_worst_comes_first() -> None:
    bound = {"bound": "max-length = 5"}
    note, danger, other = findings_of(
        [
            ("destination-classic", "a", {}),
            ("destination-refuses", "a", {**bound, "queue": "a"}),
            ("destination-classic", "b", {}),
            ("destination-classic", "a", {}),
            ("destination-refuses", "b", {**bound, "queue": "b"}),
        ]
    )[::-1]
    assert [danger.subjects, other.subjects, note.subjects] == [("b",), ("a",), ("a", "b")]
    assert [each.severity for each in (danger, other, note)] == ["danger", "danger", "note"]
    assert danger.remedy == "add 'b' to rabbitdelay_may_refuse"
    assert {fault.severity for fault in FAULTS.values()} == set(get_args(Severity))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("amqp://u%40x:p%2F@host:5673/v", "http://host:15672"),
        ("amqps://host", "https://host:15671"),
        ("amqp://u:p@[::1]", "http://[::1]:15672"),
    ],
)
def test_by_default_the_api_is_at_the_broker_s_host(url: str, expected: str) -> None:
    assert management_api_of(Connection(url)).url == expected


def test_the_probes_of_other_levels_say_nothing_about_these() -> None:
    late = {"days.x1": 61.0, "hours.x1": -2.0, "route": 0.1}
    workers: dict[str, dict[str, Any]] = {
        "one": {"probe": {"prefix": "ours", "late": late}},
        "two": {},
        "three": {"probe": {"prefix": "others", "late": {"days.x10": 61.0}}},
    }
    found = [subject for _, subject, _ in checks.check_probes(Settings(prefix="ours"), workers)]
    assert found == ["level days.x1", "level hours.x1"]


def test_that_no_worker_probes_is_said_where_one_should() -> None:
    others: dict[str, dict[str, Any]] = {"one": {"probe": {"prefix": "others", "late": {}}}}
    no_probes = Settings(prefix="ours", modules=("check-in",))

    assert list(checks.check_probes(Settings(prefix="ours"), others)) == [
        ("probe-unknown", "ours", {})
    ]
    assert not list(checks.check_probes(no_probes, others))
    assert not list(checks.check_probes(Settings(prefix="ours"), None))
