"""Which permission the broker says is missing, and which permissions each role is given."""

import re
from typing import get_args

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
from celery_rabbitdelay.operations.permissions import Role, rights, topic_rights
from celery_rabbitdelay.publishing.refusals import missing_permission, permissions_named

CONF = Celery(set_as_current=False).conf

QUEUES = [
    Queue("mail", Exchange("mail", type="direct"), "mail"),
    Queue("daily.reports", Exchange("reports", type="topic"), "daily.#", no_declare=True),
]


DECLARE, PUBLISH = spec.Queue.Declare, spec.Basic.Publish


def refused(reply: str, method: tuple[int, int] = spec.Basic.Publish) -> AccessRefused:
    return AccessRefused(f"ACCESS_REFUSED - {reply}", method, "", 403)


def test_a_reply_is_read() -> None:
    for access, method, permission in (
        ("configure access to queue 'q'", DECLARE, ("web", "configure", "queue", "q", "/")),
        ("access to exchange 'a.b'", PUBLISH, ("web", "write", "exchange", "a.b", "shop")),
        ("access to queue 'q'", DECLARE, ("web", "configure or read", "queue", "q", "/")),
        (
            *("write access to topic '0.\n.x' in exchange 'x'", PUBLISH),
            ("u", "write", "exchange", "x", "/", "0.\n.x"),
        ),
    ):
        reply = f"{access} in vhost '{permission[4]}' refused for user '{permission[0]}'"
        found = missing_permission(refused(reply, method))
        assert found == exceptions.MissingPermission(*permission)
    # A reply has 255 bytes at most.
    for other in (
        refused("Login was refused using authentication mechanism PLAIN."),
        refused(f"write access to exchange '{'x' * 180}' in vho"),
        NotFound("access to queue 'q' in vhost '/' refused for user 'web'", DECLARE, "", 404),
    ):
        assert missing_permission(other) is None
        with pytest.raises(type(other)), permissions_named():
            raise other


@pytest.mark.parametrize("role", get_args(Role))
def test_no_role_reaches_other_queues(role: Role) -> None:
    topology, own = Topology("a.b", binary(), shards=2), Celery(set_as_current=False).conf
    own.update(control_exchange="shop", event_exchange="shop-events", event_queue_prefix="shop-ev")
    others = (
        *("xa.b.delivery", "a.b", "other.delivery", "secret", "axb.delivery"),
        *("celery.pidbox", "celeryev", "celeryev.1"),
    )
    for may_declare in (True, False):
        for pattern in rights(role, topology, QUEUES, own, may_declare=may_declare):
            assert not any(pattern and re.search(pattern, name) for name in others), pattern


def test_a_producer_of_delayed_tasks_that_declares_nothing_may_write_to_the_levels_alone() -> None:
    topology = Topology()
    needed = rights("producer", topology, QUEUES, CONF, may_declare=False, only_delayed=True)
    configure, write, read = needed
    assert configure == read == ""
    writable = {each.name for each in topology.exchanges if re.search(write, each.name)}
    assert writable == {each.name for each in topology.exchanges if each.type == "topic"}
    assert not any(re.search(write, queue.name) for queue in topology.queues)
    # Each has a topic permission where there are any.
    assert {each.exchange for each in topic_rights(topology, QUEUES)} == writable


@pytest.mark.parametrize("may_declare", [True, False])
def test_a_producer_may_publish_tasks_without_a_delay(may_declare: bool) -> None:
    """Celery publishes them to the exchange of the queue, unless it is direct."""
    write = rights("producer", Topology(), QUEUES, CONF, may_declare=may_declare).write
    assert all(re.search(write, exchange) for exchange in ("amq.default", "reports"))


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
