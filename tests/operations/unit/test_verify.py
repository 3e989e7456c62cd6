"""What ``verify`` concludes from an inventory, without a broker."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.exceptions import InvalidManagementURL
from celery_rabbitdelay.levels.topology import Binding, Topology
from celery_rabbitdelay.operations import checks
from celery_rabbitdelay.operations.inventory import Inventory, effective_policies
from celery_rabbitdelay.operations.management import ManagementAPI, management_api
from celery_rabbitdelay.operations.verify import FAULTS, Severity, findings_of
from celery_rabbitdelay.publishing.kombu_internals import Counts

REFERENCE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "command_line.md"

HOURS = "rabbitdelay.hours.7"

EMPTY = Inventory(version="4.0.5")


def queue_of(name: str, **others: Any) -> dict[str, Any]:
    found = {"name": name, "type": "quorum", "durable": True, "auto_delete": False, "node": "a"}
    return {**found, "arguments": {}, "members": ["a"], "online": ["a"], **others}


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
    assert told == {code: fault["severity"] for code, fault in FAULTS.items()}


def test_each_command_of_a_way_out_stands_in_backticks() -> None:
    # Those are run as they are printed, by tests/operations/integration/test_verify.py.
    for code, fault in FAULTS.items():
        text = re.sub("`[^`]+`", "", fault["remedy"])
        assert not re.search("rabbitmqctl|rabbitmq-|celery ", text), code


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
    topology = Topology()
    bindings = frozenset({*topology.bindings, Binding(source, pattern, target)})
    found = [
        code for code, *_ in checks.check_strangers(topology, EMPTY._replace(bindings=bindings))
    ]
    assert found == ["binding-additional"] * is_found


def test_the_version_is_too_old_or_has_a_fault() -> None:
    for version, codes in {
        "3.9.29": ["version-too-old"],
        "3.10.0": [],
        "4.3.0": ["version-fault"],
        "4.3.2+1.g1234567": ["version-fault"],
        "4.3.3-rc.1": [],
        "5.0": [],
    }.items():
        found = checks.check_broker(Settings(), Inventory(version=version))
        assert [code for code, *_ in found] == codes, version


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


@pytest.mark.parametrize(
    ("declared", "there", "is_found"),
    [
        # RabbitMQ 4.3 adds the type of a queue that is declared without one.
        ({}, {"x-queue-type": "classic"}, False),
        ({}, {"x-queue-type": "classic", "x-expires": 5}, True),
        ({"x-expires": 5}, {}, True),
        ({"x-queue-type": "quorum"}, {"x-queue-type": "classic"}, True),
    ],
)
def test_a_queue_of_tasks_differs_by_its_arguments_and_not_by_a_type_that_nobody_asked_for(
    declared: dict[str, Any], there: dict[str, Any], is_found: bool
) -> None:
    queue = queue_of("orders", type=there.get("x-queue-type", "classic"), arguments=there)
    inventory = EMPTY._replace(queues={"orders": queue})
    orders = Queue("orders", queue_arguments=declared)
    found = [code for code, *_ in checks.check_destinations(Settings(), [orders], inventory)]
    assert found == ["destination-differs"] * is_found


def test_of_several_policies_some_are_in_effect() -> None:
    # The highest priority alone; of one priority, each may be in effect.
    assert in_effect(policy({"expires": 1}, 5), policy({"length": 2}, 6)) == [{"length": 2}]
    both = [{"expires": 1}, {"length": 2}]
    assert in_effect(*map(policy, both)) == both
    # The smaller bound, and the overflow of the operator.
    users = policy({"max-length": 2, "overflow": "reject-publish", "expires": 9})
    operators = {"max-length": 3, "overflow": "drop-head", "expires": 1}
    expected = [{**operators, "max-length": 2}]
    assert in_effect(users, policy(operators, kind="operator policy")) == expected


def test_a_policy_matches_by_name_and_type() -> None:
    for apply_to, pattern, matches in (
        ("all", "^rabbitdelay", True),
        ("quorum_queues", r"hours\.7$", True),
        ("queues", "(?<name>unknown to Python", True),
        ("classic_queues", "", False),
        ("exchanges", "", False),
        ("queues", "^hours", False),
    ):
        found = in_effect({**policy({"expires": 1}, pattern=pattern), "apply-to": apply_to})
        assert found == [{"expires": 1} if matches else {}], (apply_to, pattern)


def test_a_remedy_outranks_the_policy() -> None:
    policies = (policy({"expires": 1, "max-length": 5, "queue-leader-locator": "balanced"}, 5000),)
    inventory = EMPTY._replace(queues={HOURS: queue_of(HOURS)}, policies=policies)
    found = findings_of(
        checks.check_policies(Topology(), inventory, (), bool), prefix="rabbitdelay", vhost="/"
    )
    assert [each.what.split()[-3] for each in found] == ["expires", "max-length"]
    for each in found:
        assert each.remedy.startswith(
            "`rabbitmqctl set_policy -p / --priority 5001 --apply-to queues rabbitdelay "
            """'^rabbitdelay\\.' '{"overflow": "reject-publish"}'`"""
        )


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
    assert {fault["severity"] for fault in FAULTS.values()} == set(get_args(Severity))


def test_orphans_are_told_from_other_queues_by_name_and_dead_lettering() -> None:
    waits = {"x-message-ttl": 1, "x-dead-letter-exchange": "rabbitdelay.days.x1"}
    ours = {f"rabbitdelay.weeks.{number}": waits for number in (1, 2)}
    others = {
        "rabbitdelay.reports.2024": {"x-message-ttl": 1, "x-dead-letter-exchange": "mine"},
        **dict.fromkeys(("rabbitdelay.eu.days.1", "other.weeks.1"), waits),
    }
    queues = {name: queue_of(name, arguments=own) for name, own in {**ours, **others}.items()}
    inventory = EMPTY._replace(queues=queues)
    assert [*checks.orphans_of(Topology(), inventory)] == [*ours]
    waiting = {"rabbitdelay.weeks.1": Counts(3, 0), "rabbitdelay.weeks.2": Counts(0, 0)}
    assert [*checks.check_orphans(Topology(), inventory, waiting)] == [
        ("orphan", "queue rabbitdelay.weeks.1", {"messages": 3}),
        ("orphan-empty", "queue rabbitdelay.weeks.2", {"messages": 0}),
    ]
    unknown, _ = checks.check_orphans(Topology(), inventory, {})
    assert unknown[2] == {"messages": "an unknown number of"}


def test_by_default_the_api_is_at_the_broker_s_host() -> None:
    for url, expected in {
        "amqp://u%40x:p%2F@host:5673/v": "http://host:15672",
        "amqps://host": "https://host:15671",
        "amqp://u:p@[::1]": "http://[::1]:15672",
    }.items():
        assert management_api(Connection(url)).url == expected


@pytest.mark.parametrize("end", ["/@host:15672", "@[host:15672"])
def test_a_url_that_is_refused_is_told_without_its_password(end: str) -> None:
    with pytest.raises(InvalidManagementURL) as refused:
        ManagementAPI(f"http://monitor:opensesame{end}")
    assert "opensesame" not in str(refused.value)


def test_late_probes_of_these_levels_are_found_and_that_no_worker_probes() -> None:
    other = {"probe": {"prefix": "others", "late": {"days.x10": 61.0}}}
    late = {"days.x1": 61.0, "hours.x1": -2.0, "route": 0.1}
    workers: dict[str, Any] = {"one": {"probe": {"prefix": "ours", "late": late}}, "two": other}
    ours = Settings(prefix="ours", modules=("check-in", "distribution", "probe"))
    found = [subject for _, subject, _ in checks.check_probes(ours, {**workers, "three": {}})]
    assert found == ["level days.x1", "level hours.x1"]
    assert list(checks.check_probes(ours, {"two": other})) == [("probe-unknown", "ours", {})]
    no_probes = Settings(prefix="ours", modules=("check-in",))
    assert not list(checks.check_probes(no_probes, {"two": other}))
