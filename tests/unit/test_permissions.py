"""Which permission the broker says is missing, and which permissions each role is given."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from amqp import spec
from amqp.exceptions import AccessRefused, NotFound
from celery import Celery
from hypothesis import given, settings
from hypothesis import strategies as st
from kombu import Exchange, Queue

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.kombu import Topology, binary
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.operations.permissions import (
    Right,
    Role,
    commands,
    patterns,
    rights,
    topic_rights,
)
from celery_rabbitdelay.publishing.permissions import missing_permission, permissions_named

CONF = Celery(set_as_current=False).conf

QUEUES = [
    Queue("mail", Exchange("mail", type="direct"), "mail"),
    Queue("daily.reports", Exchange("reports", type="topic"), "daily.#", no_declare=True),
]


def refused(reply: str, method: tuple[int, int] = spec.Basic.Publish) -> AccessRefused:
    return AccessRefused(f"ACCESS_REFUSED - {reply}", method, "", 403)


DECLARE, PUBLISH = spec.Queue.Declare, spec.Basic.Publish


@pytest.mark.parametrize(
    ("access", "method", "permission"),
    [
        ("configure access to queue 'q'", DECLARE, ("web", "configure", "queue", "q", "/")),
        ("access to exchange 'a.b'", PUBLISH, ("web", "write", "exchange", "a.b", "shop")),
        ("access to queue 'q'", DECLARE, ("web", "configure or read", "queue", "q", "/")),
        (
            *("write access to topic '0.0.secret' in exchange 'x'", PUBLISH),
            ("u", "write", "exchange", "x", "/", "0.0.secret"),
        ),
        (
            *("access to topic '0.\n.x' in exchange 'x'", PUBLISH),
            ("u", "write", "exchange", "x", "/", "0.\n.x"),
        ),
    ],
)
def test_a_reply_is_read(access: str, method: Any, permission: tuple[str, ...]) -> None:
    user, *_, vhost = permission[:5]
    reply = f"{access} in vhost '{vhost}' refused for user '{user}'"
    found = missing_permission(refused(reply, method))
    assert found == exceptions.MissingPermission(*permission)


@pytest.mark.parametrize(
    "error",
    [
        refused("Login was refused using authentication mechanism PLAIN."),
        # A reply has 255 bytes at most.
        refused(f"write access to exchange '{'x' * 180}' in vho"),
        NotFound("access to queue 'q' in vhost '/' refused for user 'web'", DECLARE, "", 404),
    ],
)
def test_an_error_that_names_no_permission_stays_as_it_is(error: Any) -> None:
    assert missing_permission(error) is None
    with pytest.raises(type(error)), permissions_named():
        raise error


@pytest.mark.parametrize("role", get_args(Role))
@pytest.mark.parametrize("may_declare", [True, False])
@pytest.mark.parametrize("topology", [Topology("a.b", binary(), shards=2)])
def test_no_role_reaches_other_queues(role: Role, may_declare: bool, topology: Topology) -> None:
    told = patterns(rights(role, topology, QUEUES, CONF, may_declare=may_declare))
    for pattern in filter(None, told):
        for name in (f"x{topology.prefix}.delivery", topology.prefix, "other.delivery", "secret"):
            assert not re.search(pattern, name), pattern
        assert not re.search(pattern, "axb.delivery")


def test_a_producer_that_declares_nothing_may_write_to_the_levels_alone() -> None:
    topology = Topology()
    configure, write, read = patterns(rights("producer", topology, QUEUES, CONF, may_declare=False))
    assert configure == read == ""
    writable = {each.name for each in topology.exchanges if re.search(write, each.name)}
    assert writable == {each.name for each in topology.exchanges if each.type == "topic"}
    assert not any(re.search(write, queue.name) for queue in topology.queues)
    # Each has a topic permission where there are any.
    assert {each.exchange for each in topic_rights(topology, QUEUES)} == writable


def test_celery_s_own_names_are_those_of_the_settings() -> None:
    own = Celery(set_as_current=False).conf
    own.update(control_exchange="shop", event_exchange="shop-events", event_queue_prefix="shop-ev")
    own.update(result_backend="rpc://")
    told = patterns(rights("worker", Topology(), QUEUES, own, may_declare=False))
    for pattern in told:
        for name in ("shop.pidbox", "w@h.shop.pidbox", "shop-events", "shop-ev.1"):
            assert re.search(pattern, name), pattern
        for name in ("celery.pidbox", "celeryev", "celeryev.1"):
            assert not re.search(pattern, name), pattern
    given_rights = rights("producer", Topology(), QUEUES, own, may_declare=False)
    configure, write, read = patterns(given_rights)
    reply_to = "5f5d29a1-6c45-3a24-9a3b-0f7e4f8b1c11"
    assert re.search(configure, reply_to)
    assert re.search(read, reply_to)
    assert not re.search(write, reply_to)


@pytest.mark.parametrize("served", [["check-in", "distribution"], ["distribution"]])
def test_a_worker_reads_the_queues_of_its_modules_and_those_that_others_declare(
    served: list[str],
) -> None:
    modules = Topology().module_queues
    given_rights = rights("worker", Topology(), QUEUES, CONF, may_declare=False, modules=served)
    configure, _, read = patterns(given_rights)
    assert bool(re.search(read, modules.checkin.name)) == ("check-in" in served)
    assert re.search(read, modules.distribution.name)
    assert not re.search(read, modules.undeliverable.name)
    assert [bool(re.search(configure, name)) for name in ("mail", "daily.reports")] == [True, False]
    assert re.search(read, "daily.reports")


@settings(max_examples=30)
@given(st.integers(0, 10**9), st.sampled_from(["mail", "daily.reports"]), st.sampled_from([1, 3]))
def test_a_producer_may_use_each_key_of_its_queues(delay_ms: int, queue: str, shards: int) -> None:
    topology = Topology(shards=shards)
    route = topology.route(delay_ms / 1000, queue, str(delay_ms))
    allowed = {each.exchange: each.write for each in topic_rights(topology, QUEUES)}
    # Python's \Z is PCRE's \z.
    assert re.search(allowed[route.exchange].replace(r"\z", r"\Z"), route.routing_key)
    for other in ("secret", DISTRIBUTION, "xmail", "mail2", "daily", "daily-reports"):
        key = topology.route(delay_ms / 1000, other, str(delay_ms)).routing_key
        assert not re.search(allowed[route.exchange].replace(r"\z", r"\Z"), key)


def test_the_commands_are_quoted_for_a_shell() -> None:
    told = list(commands("o'neill", "my host", [Right("write", "a")], []))
    assert told == ["rabbitmqctl set_permissions -p 'my host' 'o'\"'\"'neill' '' '^(a)$' ''"]
