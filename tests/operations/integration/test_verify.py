"""``verify`` finds each fault that is planted on a real broker, and none on a sound one."""

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from celery.platforms import EX_UNAVAILABLE
from kombu import Connection, Queue

from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.exceptions import PublishError
from celery_rabbitdelay.levels.layout import custom
from celery_rabbitdelay.operations.undeliverable import undeliverable_messages
from celery_rabbitdelay.operations.verify import FAULTS as FINDINGS
from celery_rabbitdelay.operations.verify import Finding, Verification, blocked
from celery_rabbitdelay.publishing.declaration import declare_destination, queue_counts
from celery_rabbitdelay.testing import wait_for
from celery_rabbitdelay.web import application
from tests.browser import Browser
from tests.json_schemas import checked, invoke
from tests.kernel.integration.conftest import LEVELS
from tests.kernel.integration.shop import make_app
from tests.kernel.integration.worker import Worker, run_celery
from tests.node_control import run_tool, set_disk_limit, set_memory_limit
from tests.operations.integration import faults
from tests.operations.integration.management import (
    QUORUM,
    Place,
    codes_of,
    node,
    place,
    place_on,
    wait_until_managed,
)
from tests.operations.integration.undeliverable_messages import message, put
from tests.rabbitmq_node import RabbitMQNode

__all__ = ["node", "place"]


@pytest.mark.parametrize(
    "settings",
    [
        Settings(prefix="skipping", layout=custom(LEVELS, zeros="skip"), shards=2),
        Settings(prefix="shop.eu", layout=custom(LEVELS, zeros="queue")),
    ],
    ids=lambda settings: settings.prefix,
)
def test_nothing_is_found_on_a_sound_broker(place: Place, settings: Settings) -> None:
    declare_destination(place.connection, settings.topology, place.orders)
    for each in (settings, place.settings):
        place.settings = each
        assert place.verify().findings == ()
    faults.harmless(place)
    assert place.verify().findings == ()


@pytest.mark.parametrize("plant", faults.FAULTS)
def test_each_planted_fault_is_found_alone_and_mended_as_printed(
    place: Place, redis_url: str, plant: faults.Plant
) -> None:
    place.redis_url, codes = redis_url, faults.FAULTS[plant]
    plant(place)
    report = place.verify_until(codes)
    assert all(each.consequence and each.remedy for each in report.findings)
    named = " ".join(" ".join((each.what, *each.subjects)) for each in report.findings)
    assert all(each in named for each in faults.NAMED.get(plant, ()))
    texts = [text for each in report.findings for text in each[3:]]
    assert not any("{policy" in text or "{difference" in text for text in texts)
    run_printed(place, report)
    mended = codes - NOT_MENDED
    wait_for(lambda: not codes_of(place.verify()) & mended, f"the end of {mended}")


def test_each_finding_is_planted() -> None:
    planted = set().union(*faults.FAULTS.values())
    assert planted.isdisjoint(PLANTED_ELSEWHERE)
    assert planted | PLANTED_ELSEWHERE == {*FINDINGS}


#: Findings that the last tests plant, on a node or a cluster of their own; and those of
#: tests/operations/unit/test_verify.py.
PLANTED_ELSEWHERE = {
    *("quorum-lost", "replica-offline", "replicas-few", "unreachable", "publishers-blocked"),
    *("probe-unknown", "probe-failed", "version-too-old", "version-fault", "feature-flag-disabled"),
    "operator-policy",
}

#: Where the way out is no command: a setting, a server, a worker, or a page.
MENDED_BY_SETTINGS = {
    *("binding-additional", "registry-unavailable", "schedule-overdue"),
    *("destination-classic", "destination-differs", "destination-drops"),
    *("destination-refuses", "destination-policy", "module-unserved"),
}

#: What is still there once the commands were run as they are printed.
NOT_MENDED = {
    *MENDED_BY_SETTINGS,
    *("classic-levels", "differs", "layout-conflict", "level-consumed", "orphan", "orphan-empty"),
}


def run_printed(place: Place, report: Verification) -> None:
    """Run each command once that is printed as a way out; each finding without one is known."""
    commands = {each.code: commands_of(each) for each in report.findings}
    assert {code for code, found in commands.items() if not found} <= MENDED_BY_SETTINGS
    for command in dict.fromkeys(chain(*commands.values())):
        run_as_printed(place, command)


def commands_of(found: Finding) -> list[str]:
    """Return the commands that a way out prints, between backticks or as a whole."""
    return re.findall(r"`((?:rabbitmqctl|rabbitmq-queues|celery) [^`]+)`", found.remedy) or [
        text for text in [found.remedy] if text.startswith("rabbitmqctl ")
    ]


def run_as_printed(place: Place, command: str) -> None:
    """Run a command as it is printed, in the application whose queues and levels are there."""
    program, *arguments = shlex.split(command)
    if program == "rabbitmqctl":
        place.node.ctl(*arguments)
        return
    if program == "rabbitmq-queues":
        run_tool(place.node, program, *arguments)
        return
    assert arguments[:3] == ["-A", "proj", "rabbitdelay"]
    app = place.app(prefix="new" if "migrate" in arguments else "")
    told = invoke(app, arguments[3:])
    # Of levels with other settings, migrate says which they have, or that nobody knows.
    names_them = "rabbitdelay_" in told.output
    assert told.exit_code == 0 or names_them, told.output


def test_nothing_on_the_broker_is_changed(place: Place) -> None:
    def everything() -> Any:
        lists = ("exchanges", "bindings", "policies")
        queues = place.api.get("queues", place.name, disable_stats="true")
        names = sorted(queue["name"] for queue in queues)
        return names, *(place.api.get(each, place.name) for each in lists)

    faults.without_queue(place)
    faults.unbound_digit(place)
    before = everything()
    place.verify()
    assert everything() == before


# celery rabbitdelay verify, run as a user does.

NOWHERE = "http://guest:very-secret@127.0.0.1:1"


@pytest.fixture
def settings(place: Place) -> dict[str, Any]:
    """The configuration of a shop whose levels and queues are declared there."""
    settings = {
        "prefix": "shop",
        "broker_url": place.url,
        "rabbitdelay_prefix": "shop",
        "rabbitdelay_layout": LEVELS,
        "rabbitdelay_modules": ["check-in", "distribution"],
    }
    app = make_app(settings)
    for queue in app.amqp.queues.values():
        declare_destination(place.connection, app.rabbitdelay.topology, queue)
    app.close()
    return settings


def test_only_a_danger_exits_with_1_and_a_warning_if_asked_to(
    place: Place, settings: dict[str, Any]
) -> None:
    settings["rabbitdelay_modules"] = ["check-in", "distribution", "probe"]
    command = f"rabbitdelay verify --management {place.management_url}"
    sound = run_celery(settings, f"{command} --strict")
    assert sound.returncode == 0, sound.stdout + sound.stderr
    # No worker runs.
    assert sound.stdout.startswith("note  probe-unknown: shop\n")
    assert sound.stdout.endswith(", shop: 0 danger, 0 warning, 1 note\n")
    place.policy(r"^shop\.second$", max_length=10)
    assert run_celery(settings, command).returncode == 0
    assert run_celery(settings, f"{command} --strict").returncode == 1
    place.policy(r"^shop\.(ms|seconds)", expires=3_600_000)
    with mock.patch.dict(os.environ, {"RABBITDELAY_MANAGEMENT_URL": place.management_url}):
        told, asked = (run_celery(settings, f"rabbitdelay verify {each}") for each in ("", "-j"))
    assert (told.returncode, asked.returncode, told.stderr) == (1, 1, "")
    assert "danger  policy: queue shop.seconds.1, " in told.stdout
    assert "and 11 more\n" in told.stdout
    assert f"  way out: `rabbitmqctl set_policy -p {place.name} " in told.stdout
    answer = checked("verify", asked.stdout)
    assert (answer["danger"], answer["warning"]) == (1, 1)


def test_delete_refuses_while_dead_lettering_holds_due_messages(
    place: Place, settings: dict[str, Any]
) -> None:
    faults.full_destination(place)
    wait_for(lambda: not waiting(place), "all levels to be empty, as far as AMQP says")

    command = "rabbitdelay delete --yes --management"
    blind = run_celery(settings, f"{command} {NOWHERE} --dry-run")
    refused = run_celery(settings, f"{command} {place.management_url}")

    assert blind.returncode == 0
    assert blind.stderr.startswith("Warning: cannot count the due messages that the delay levels ")
    assert refused.returncode == 1
    assert (
        " messages still wait in 1 queues under the prefix 'shop', for example in shop.ms.100"
        in (refused.stderr)
    )
    forced = run_celery(settings, f"{command} {place.management_url} --force")
    assert forced.returncode == 0, forced.stderr
    assert "deleting loses 8 messages: shop.ms.100\n" in forced.stdout


def waiting(place: Place) -> int:
    """Return how many messages are ready in the levels."""
    counts = queue_counts(place.connection, place.topology.queues)
    return sum(each.messages for each in counts.values() if each)


def test_the_consumers_of_a_worker_and_of_a_reader_are_no_strangers(
    place: Place, settings: dict[str, Any]
) -> None:
    modules = place.topology.module_queues
    put(place.connection, place.topology, message("x", {}))
    served = {each.name for each in (modules.checkin, modules.distribution, modules.undeliverable)}

    def consumed() -> bool:
        return served <= {each["queue"]["name"] for each in place.api.get("consumers", place.name)}

    with Worker(settings), closing(undeliverable_messages(place.connection, place.topology)) as one:
        next(one)
        wait_for(consumed, "consumers")
        assert place.verify().findings == ()


def test_without_the_management_api_the_error_says_how_to_name_it(settings: dict[str, Any]) -> None:
    told = run_celery(settings, f"rabbitdelay verify --management {NOWHERE}")
    # Its default port is not the one of this node.
    asked = run_celery(settings, "rabbitdelay verify -j")

    assert told.returncode == asked.returncode == EX_UNAVAILABLE
    line, page = told.stderr.splitlines()
    assert page == "See how-to/verify in the documentation of celery_rabbitdelay."
    assert line.startswith("Error: the management API http://127.0.0.1:1 cannot be used: ")
    assert "rabbitmq-plugins enable rabbitmq_management" in line
    assert "RABBITDELAY_MANAGEMENT_URL" in line
    assert "very-secret" not in told.stdout + told.stderr
    assert "http://127.0.0.1:15672" in checked("error", asked.stdout)["error"]


def test_a_limit_of_the_broker_is_named_and_no_queue_is_advised_to_be_deleted(
    place: Place,
) -> None:
    faults.without_levels(place)
    place.put("vhost-limits", place.name, "max-queues", value=3)
    with pytest.raises(PublishError) as sent:
        place.app().send_task("look", delay=2, confirm_timeout=2)
    assert f"queue limit in vhost '{place.name}' (3) is reached" in str(sent.value)
    assert "set_vhost_limits" in str(sent.value)
    assert "Delete" not in str(sent.value)


# A cluster of three.


@pytest.fixture(scope="module")
def cluster(broker_root: Path | None) -> Iterator[list[RabbitMQNode]]:
    """Three nodes of one cluster with their management API."""
    with ExitStack() as stack:
        first = stack.enter_context(RabbitMQNode(broker_root, management=True))
        joining = [RabbitMQNode(broker_root, cluster_with=first, management=True) for _ in range(2)]
        nodes = [first, *(stack.enter_context(node) for node in joining)]
        wait_until_managed(first)
        yield nodes


@pytest.fixture
def in_cluster(cluster: list[RabbitMQNode]) -> Iterator[Place]:
    """Sound levels and a destination in a virtual host of this test's own."""
    with place_on(cluster[0]) as place:
        yield place
        # Without a majority of its queues, a virtual host takes more than a minute to delete.
        for node in cluster:
            if not node.running:
                node.start()


def test_that_publishers_are_blocked_is_seen_by_verify_by_status_and_on_the_page(
    in_cluster: Place,
) -> None:
    place, node, app = in_cluster, in_cluster.node, in_cluster.app()
    place.is_blocked = app.rabbitdelay.is_blocked
    page = Browser(application(app, loopback_role="operator"))  # without the management API

    def is_blocked() -> bool:
        words = [each["words"].lower() for each in page.json("/now")["problems"]]
        return blocked().what.lower() in words

    assert not is_blocked()
    set_memory_limit(node, "{absolute, 1000000}")
    set_disk_limit(node, "{mem_relative, 1.0e6}")
    report = place.verify_until({"publishers-blocked"})
    wait_for(lambda: place.verify().findings[0].subjects == (f"node {node.node}",), "its name")
    settings = {"prefix": "shop", "broker_url": place.url, "rabbitdelay_prefix": "shop"}
    shown = run_celery({**settings, "rabbitdelay_layout": LEVELS}, "rabbitdelay status")
    assert shown.returncode == 1
    assert shown.stdout.startswith("danger  publishers-blocked: RabbitMQ\n")
    wait_for(is_blocked, "the page")
    assert "rabbitmqctl set_disk_free_limit" in page.json("/health")["findings"][0]["remedy"]
    run_printed(place, report)
    place.verify_until(set())
    wait_for(lambda: not page.json("/health")["findings"], "the end of the alarm")


def test_what_a_node_takes_with_it_is_found(cluster: list[RabbitMQNode], in_cluster: Place) -> None:
    (*_, third), place = cluster, in_cluster
    assert place.verify().findings == ()
    classic = Queue("classic", queue_arguments={})
    of_two = {**QUORUM, "x-quorum-initial-group-size": 2}
    half, other_half = (Queue(name, queue_arguments=of_two) for name in ("half", "other half"))
    place.destinations += [classic, half, other_half]
    with Connection(f"{third.url.removesuffix('//')}/{place.name}") as connection:
        # Classic queues are on the node where they are declared, quorum queues there and elsewhere.
        for queue in (classic, half, other_half):
            declare_destination(connection, place.topology, queue)
    report = place.verify_until({"replicas-few", "destination-classic"})
    assert report.findings[0].what == "it has 2 replicas in a cluster of 3 nodes"

    third.kill()

    codes = {"destination-classic", "quorum-lost", "replica-offline", "replicas-few"}
    report = place.verify_until({*codes, "unreachable"})
    subjects = {finding.code: finding.subjects for finding in report.findings}
    assert subjects["unreachable"] == ("queue classic",)
    assert subjects["quorum-lost"] == ("queue half", "queue other half")
    assert {f"queue {queue.name}" for queue in place.topology.queues} <= {
        *subjects["replica-offline"]
    }

    other_half(place.connection.default_channel).delete()
    place.destinations.remove(other_half)
    third.start()
    run_printed(place, place.verify_until({"replicas-few", "destination-classic"}))
    place.verify_until({"destination-classic"})
