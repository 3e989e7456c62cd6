"""Each user of the broker works with the rights that the documentation gives it, and no others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import amqp
import celery
import pytest
from amqp.exceptions import AccessRefused
from kombu import Connection, Exchange, Queue

from celery_rabbitdelay import Outcome
from celery_rabbitdelay.exceptions import (
    DeclarationNotPermitted,
    MessageNotPermitted,
    PermissionMissing,
    RowsNotConfirmed,
)
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.entities import MODULES
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.permissions import (
    Right,
    Role,
    commands,
    patterns,
    rights,
    topic_rights,
)
from celery_rabbitdelay.publishing.declaration import bind_destination, declare
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from celery_rabbitdelay.testing.servers import PATIENCE
from tests.integration.arrivals import count, take
from tests.integration.conftest import LEVELS, SHORT
from tests.integration.management import node
from tests.integration.permissions import PAGE, Host, host_on, lines_for, lines_of_page
from tests.integration.permitted_shop import Program, Worker, make_app
from tests.integration.worker import answer
from tests.unit.clock import frozen

__all__ = ["node"]

SMALL = Topology("rabbitdelay", SHORT)
CONF = celery.Celery(set_as_current=False).conf
CELERY = Queue("celery", Exchange("celery", type="direct"), "celery")


@pytest.fixture
def host(node: RabbitMQServer) -> Iterator[Host]:
    """A virtual host of this test's own."""
    with host_on(node) as host:
        yield host


@pytest.fixture
def make(redis_url: str) -> Iterator[Callable[..., Any]]:
    """Makes the application as a user of the broker has it."""
    made = []

    def make_for(url: str, **settings: Any) -> Any:
        made.append(make_app({"broker_url": url, "result_backend": redis_url, **settings}))
        return made[-1]

    yield make_for
    for app in made:
        app.close()


def needed(role: Role, mode: str, topology: Topology = SMALL) -> list[Right]:
    return list(rights(role, topology, [CELERY], CONF, may_declare=mode == "auto"))


def levels(**more: Any) -> dict[str, Any]:
    """Return settings with the small levels, which only operators declare."""
    return {"rabbitdelay_layout": LEVELS, "rabbitdelay_declare": "never", **more}


def declared(host: Host, *queues: Queue, topology: Topology = SMALL) -> None:
    """Declare the levels and queues, as an operator does."""
    declare(host.connection, topology)
    for queue in queues:
        queue(host.connection.default_channel).declare()
        bind_destination(host.connection, topology, queue.name)


def hand_in_task(app: Any, url: str, order: int, delay_ms: int) -> str:
    """Publish a task to check-in as another client would; return its id."""
    message = app.amqp.create_task_message(f"handed-in-{order}", "remind", (order,), {})
    with Connection(url) as connection:
        connection.Producer(auto_declare=False).publish(
            message.body,
            serializer="json",
            exchange="rabbitdelay.checkin",
            routing_key="celery",
            headers={**message.headers, "x-delay": delay_ms},
            **message.properties,
        )
    return str(message.headers["id"])


# The lines of the page.


@pytest.mark.parametrize(
    ("user", "role", "mode"),
    [
        ("shop-web", "producer", "auto"),
        ("shop-web-only", "producer", "never"),
        ("shop-worker", "worker", "auto"),
        ("shop-worker-only", "worker", "never"),
        ("letter-writer", "check-in", "auto"),
        ("operator", "operator", "auto"),
    ],
)
def test_the_page_shows_what_the_command_prints(user: str, role: Role, mode: str) -> None:
    topology = Topology()
    topics = topic_rights(topology, [CELERY]) if role == "producer" and mode == "never" else ()
    assert lines_for(user) == list(commands(user, "/", needed(role, mode, topology), topics))


def test_the_page_shows_no_other_lines() -> None:
    assert len(lines_of_page()) == 6 + 9


def test_the_lines_are_commands_of_rabbitmqctl(node: RabbitMQServer) -> None:
    topic = next(line for line in lines_of_page() if "topic" in line)
    with host_on(node) as one, host_on(node) as other:
        for each in (one, other):
            # RabbitMQ 4.3 refuses a topic permission on an exchange that does not exist.
            Topology().level_exchanges[0](each.connection.default_channel).declare()
        for line in (lines_of_page()[0], topic):
            told, same = one.apply(line, by_program=True), other.apply(line)
            assert len(told) == 1
            assert str(told).replace(one.name, other.name) == str(same)


class Acting:
    """A user with the lines of the page, and the application as this user has it."""

    def __init__(self, host: Host, user: str, mode: str, redis_url: str) -> None:
        for line in lines_for(user):
            host.apply(line)
        self.host, self.user = host, user
        self.settings: dict[str, Any] = {
            "broker_url": host.url_of(user),
            "result_backend": redis_url,
            "rabbitdelay_registry_url": redis_url,
            "rabbitdelay_registry_options": {"socket_timeout": 10},
            "rabbitdelay_confirm_timeout": 150,
            "rabbitdelay_registry_prefix": host.name,
            "rabbitdelay_declare": mode,
            "rabbitdelay_modules": list(MODULES),
            "rabbitdelay_layout": LEVELS,
        }
        if user == "shop-web-only":
            # It may write to the exchanges of the clock, and may not send to distribution.
            self.settings |= {"rabbitdelay_modules": [], "rabbitdelay_layout": "clock"}
        self.app = make_app(self.settings)
        self.remind: Any = self.app.tasks["remind"]

    def command(self, line: str, warning: str = "") -> str:
        """Run a command of ``celery rabbitdelay``, and return what it prints."""
        management = self.host.node.management_url.replace(
            "guest:guest", f"{self.user}-{self.host.name}:secret"
        )
        told = Program.run(
            self.settings, f"rabbitdelay {line}", RABBITDELAY_MANAGEMENT_URL=management
        )
        assert told.returncode == 0, told.stderr + told.stdout
        assert told.stderr == "" or (warning and warning in told.stderr), told.stderr
        assert "ACCESS_REFUSED" not in told.stderr
        return told.stdout


def send_one(acting: Acting) -> None:
    """A task waits."""
    acting.remind.apply_async((1,), delay=1)
    take(acting.host.connection, [CELERY], 1)


def send_several(acting: Acting) -> None:
    """Tasks wait."""
    rows = [{"args": (each,), "delay": each % 2} for each in range(20)]
    acting.app.rabbitdelay.send_many("remind", rows, envelopes=False)
    take(acting.host.connection, [CELERY], 20)


def cancel_one(acting: Acting) -> None:
    """A task is cancelled by a call and by the command; a producer does not reach the workers."""
    sender = make_app({**acting.settings, "broker_url": acting.host.url})
    with Worker({**acting.settings, "broker_url": acting.host.url}) as worker:
        sent = [sender.tasks["remind"].apply_async((1,), delay=60) for _ in range(3)]
        for each in sent[:2]:
            assert acting.app.rabbitdelay.cancel(each) is Outcome.NOTED
        not_told = "" if acting.user == "operator" else "The cancel counts, but workers"
        said = acting.command(f"cancel {sent[2].id} --also-future", not_told)
        assert said.startswith(f"{sent[2].id}: noted")
        if acting.user == "operator":
            wait_for(lambda: worker.log.count("flagged as revoked") == 3, "revokes")
        else:
            # A refusal leaves nothing broken.
            acting.remind.apply_async((2,), delay=1).get(timeout=PATIENCE)
    sender.close()


def postpone_one(acting: Acting) -> None:
    """A task is to run later, and then earlier."""
    sender = make_app({**acting.settings, "broker_url": acting.host.url})
    sent = sender.tasks["remind"].apply_async((1,), delay=60, track=True)
    sender.close()
    assert acting.command(f"postpone {sent.id} --delay 90") == f"{sent.id}: done\n"
    assert acting.app.rabbitdelay.postpone(sent, delay=1) is Outcome.DONE
    take(acting.host.connection, [CELERY], 1)


def run_tasks(acting: Acting) -> None:
    """Tasks arrive from the levels, from check-in and from distribution, and are retried."""
    sender = make_app({**acting.settings, "broker_url": acting.host.url})
    with Worker(acting.settings) as process:
        sent = [sender.tasks["remind"].apply_async((order,), delay=order) for order in (1, 2)]
        sender.rabbitdelay.send_many("remind", [{"args": (3,), "delay": 1}] * 20)
        sent.append(sender.AsyncResult(hand_in_task(sender, acting.host.url, 4, 500)))
        assert [each.get(timeout=PATIENCE) for each in sent] == [1, 2, 4]
        assert sender.control.ping(timeout=PATIENCE, limit=1)
        assert "lacks the permission" not in process.log
        assert "ACCESS_REFUSED" not in process.log
    sender.close()


def put_schedules(acting: Acting) -> None:
    """A schedule is put, its occurrence comes, and its task is sent by hand."""
    schedules, second = acting.app.rabbitdelay.schedules, timedelta(seconds=1)
    first = schedules.put("a", "remind", second, (1,)).next_at
    take(acting.host.connection, [CELERY], 1)
    # The first one still waits.
    assert schedules.backfill("a", first - 2 * second, first) == 2
    take(acting.host.connection, [CELERY], 2)
    assert schedules.delete("a")


def publish_next_occurrences(acting: Acting) -> None:
    """A worker puts the entries of beat, and publishes what follows each occurrence."""
    entries = {"a": {"task": "remind", "schedule": 1.0, "args": (1,)}}
    settings = {**acting.settings, "rabbitdelay_beat": True, "beat_schedule": entries}
    schedules, name = acting.app.rabbitdelay.schedules, "beat:shop:a"
    with Worker(settings) as process:
        wait_for(lambda: schedules.get(name), "the schedule")
        first = schedules.get(name).next_at
        later = first + timedelta(seconds=3)
        wait_for(lambda: schedules.get(name).next_at > later, "four occurrences")
        assert "lacks the permission" not in process.log
        assert "ACCESS_REFUSED" not in process.log
    assert schedules.get(name).last is not None
    schedules.delete(name)


def hand_in(acting: Acting) -> None:
    """A client publishes to check-in."""
    hand_in_task(acting.app, acting.host.url_of(acting.user), 4, 500)
    take(acting.host.connection, [SMALL.module_queues.checkin], 1)


def verify_all(acting: Acting) -> None:
    """Nothing is found that would be a danger."""
    host, name = acting.host, f"{acting.user}-{acting.host.name}"
    # The page has the tag; on 3.10, verify needs another one.
    version = str(host.connection.connection.server_properties["version"])
    tag = "administrator" if version.startswith("3.10.") else "monitoring"
    host.put("users", name, password="secret", tags=tag)
    assert "0 danger" in acting.command("verify")


def bring_back(acting: Acting) -> None:
    """Undeliverable tasks are listed, exported, sent again and deleted."""
    for queue in SMALL.level_queues["ms.x100"]:
        queue(acting.host.connection.default_channel).delete()
    sender = make_app({**acting.settings, "broker_url": acting.host.url})
    with frozen():
        sent = [sender.tasks["remind"].apply_async((1,), delay=0.9) for _ in range(2)]
    sender.close()
    name = SMALL.module_queues.undeliverable.name
    wait_for(lambda: count(acting.host.connection, name) == 2, "undeliverable tasks")
    assert "2 undeliverable messages" in acting.command("undeliverable list")
    acting.command("undeliverable export -", "written to -")
    acting.command(f"undeliverable redrive --id {sent[0].id}")
    take(acting.host.connection, [CELERY], 1)
    acting.command("undeliverable purge --yes")
    assert count(acting.host.connection, name) == 0


def migrate_all(acting: Acting) -> None:
    """With the further rights that the page names, what waits under another prefix is moved."""
    further = r"old\..*"
    assert f"- `{further}` for `migrate --from-prefix old`" in PAGE.read_text()
    for line in lines_for(acting.user):
        acting.host.apply(line.replace("^(", f"^({further}|"))
    former = {"rabbitdelay_prefix": "old", "rabbitdelay_registry_prefix": acting.host.name}
    sender = make_app({**acting.settings, **former, "broker_url": acting.host.url})
    sender.tasks["remind"].apply_async((1,), delay=600)
    sender.close()
    moved = acting.command("migrate --from-prefix old --ignore-registry")
    assert moved.startswith("1 messages moved"), moved


#: What the page's words mean.
ACTIONS: dict[str, Callable[[Acting], object]] = {
    "apply_async": send_one,
    "send_many": send_several,
    "cancel": cancel_one,
    "postpone": postpone_one,
    "schedules.put": put_schedules,
    "worker": run_tasks,
    "rabbitdelay_beat": publish_next_occurrences,
    "basic.publish": hand_in,
    "declare": lambda acting: acting.command("declare --queues"),
    "delete": lambda acting: acting.command("delete --yes", "only the management API shows"),
    "status": lambda acting: acting.command("status"),
    "verify": verify_all,
    "undeliverable": bring_back,
    "migrate": migrate_all,
}

#: The users of the page's lines, by the first two cells of its table.
USERS = {
    ("producer", "auto"): "shop-web",
    ("producer", "never"): "shop-web-only",
    ("worker", "auto"): "shop-worker",
    ("worker", "never"): "shop-worker-only",
    ("check-in client", ""): "letter-writer",
    ("operator", ""): "operator",
}


def rows_of_page() -> list[tuple[str, str, str]]:
    """Return the user, the setting and an action for each action of the page's table."""
    found = []
    for line in PAGE.read_text().partition("| it runs |")[2].partition("\n\n")[0].splitlines()[2:]:
        user, mode, actions, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        found += [(user, mode.strip('`"'), each) for each in re.findall("`(.*?)`", actions)]
    return found


def test_the_page_has_all_users_and_actions() -> None:
    rows = rows_of_page()
    assert {(user, mode) for user, mode, _ in rows} == USERS.keys()
    assert {action for _, _, action in rows} == ACTIONS.keys()


@pytest.mark.parametrize(("user", "mode", "action"), rows_of_page())
def test_each_user_runs_each_of_its_actions_with_the_lines_of_the_page(
    host: Host, redis_url: str, user: str, mode: str, action: str
) -> None:
    if action != "declare" and mode != "auto":
        declared(host, CELERY, topology=Topology() if user == "producer" else SMALL)
    acting = Acting(host, USERS[user, mode], mode or "auto", redis_url)
    try:
        ACTIONS[action](acting)
    finally:
        acting.app.close()


# The restricted producer.


def forge(exchange: str, key: str, **more: Any) -> amqp.Message:
    """Return a message that asks distribution for an exchange and a key."""
    told = {headers.DUE: 5, headers.EXCHANGE: exchange, headers.ROUTING_KEY: key, **more}
    return amqp.Message("forged", application_headers=told)


#: It asks for a queue that only others may reach.
FOR_SECRET = forge("", "secret", **{headers.QUEUE: "secret"})


def publish(url: str, key: str, message: amqp.Message, exchange: str) -> None:
    with Connection(url, transport_options={"confirm_publish": True}) as connection:
        channel: Any = connection.default_channel
        channel.basic_publish(message, exchange, key)


@pytest.fixture
def restricted(host: Host) -> str:
    """The URL of a producer that may delay tasks for the queue ``celery`` only."""
    declared(host, CELERY, Queue("secret"))
    return host.let("web", needed("producer", "never"), topic_rights(SMALL, [CELERY]))


@pytest.mark.parametrize(
    ("exchange", "key"),
    [
        ("delivery", "0.0.secret"),
        ("delivery", "0.0.%distribution"),
        # These match no binding, so distribution would look into the headers.
        ("delivery", "0.0.0.celery"),
        ("delivery", "0.0.celery\n"),
        # Behind the levels.
        *((name, "secret") for name in ("unrouted", "meditation", "meditated", "undeliverable")),
    ],
)
def test_a_restricted_producer_cannot_name_another_destination(
    host: Host, restricted: str, exchange: str, key: str
) -> None:
    with pytest.raises(AccessRefused, match=f"(?s)access to .*rabbitdelay.{exchange}"):
        publish(restricted, key, FOR_SECRET, f"rabbitdelay.{exchange}")
    assert count(host.connection, SMALL.module_queues.distribution.name) == 0
    assert count(host.connection, "secret") == 0


def test_the_error_names_the_routing_key_that_is_not_allowed(
    restricted: str, make: Callable[..., Any]
) -> None:
    app = make(restricted, **levels(rabbitdelay_modules=[]))
    with pytest.raises(MessageNotPermitted, match=r"lacks the topic permission write") as caught:
        app.tasks["remind"].apply_async((1,), delay=1, queue="secret")
    # What is left of the second when it is written.
    level, digits = caught.value.permission.name, caught.value.permission.topic
    assert level in {"rabbitdelay.seconds.x1", "rabbitdelay.ms.x100", "rabbitdelay.delivery"}
    assert re.fullmatch(r"\d\.\d\.secret", digits or "")
    assert not caught.value.may_have_arrived


# What the errors name.


def assert_named(error: PermissionMissing, right: Right) -> None:
    """Assert that an error names a right that was taken away."""
    assert right.permission in error.permission.permission
    assert re.fullmatch(right.pattern, error.permission.name), error


def without(role: Role, mode: str) -> Any:
    """Parametrize a test with the lack of each right of a role."""
    every = needed(role, mode)
    cases = [
        pytest.param(right, [each for each in every if each != right], id="-".join(right))
        for right in every
    ]
    return pytest.mark.parametrize(("right", "rest"), cases)


@without("producer", "auto")
def test_a_producer_is_told_which_permission_it_lacks(
    host: Host, make: Callable[..., Any], right: Right, rest: list[Right]
) -> None:
    app = make(host.let("web", rest), rabbitdelay_layout=LEVELS)
    with pytest.raises(DeclarationNotPermitted) as caught:
        app.tasks["remind"].apply_async((1,), delay=1)
    assert_named(caught.value, right)
    assert caught.value.permission.user == f"web-{host.name}"
    assert caught.value.permission.virtual_host == host.name
    assert "rabbitmqctl set_permissions" in str(caught.value)
    assert not caught.value.may_have_arrived


@without("producer", "never")
def test_a_producer_that_declares_nothing_is_told_which_permission_it_lacks(
    host: Host, make: Callable[..., Any], right: Right, rest: list[Right]
) -> None:
    declared(host, CELERY)
    app = make(host.let("web", rest), **levels())
    delay = 0 if right.pattern.endswith("delivery") else 1
    rows = [{"args": (1,), "delay": delay}]
    with frozen(), pytest.raises(RowsNotConfirmed) as caught:
        app.rabbitdelay.send_many("remind", rows, envelopes=False)
    error = caught.value.errors[0]
    assert isinstance(error, MessageNotPermitted)
    assert_named(error, right)
    assert caught.value.uncertain == ()


# Workers.


def test_what_a_module_may_not_publish_is_undeliverable_and_its_reason_names_the_permission(
    host: Host, redis_url: str
) -> None:
    news = Exchange("news", type="topic")
    declared(host, CELERY)
    news(host.connection.default_channel).declare()
    channel: Any = host.connection.default_channel
    _, key, _ = SMALL.route(0, DISTRIBUTION)
    for order in range(3):
        message = forge("news", "x")
        message.body = f"forged {order}"
        channel.basic_publish(message, SMALL.delivery.name, key)
        told = {"x-delay": 5000, "rabbitdelay-exchange": "celery"}
        message = amqp.Message(f"delayed {order}", application_headers=told)
        channel.basic_publish(message, "rabbitdelay.checkin", "celery")
    rest = needed("worker", "never")
    rest.remove(Right("write", r"rabbitdelay\..*"))
    rest.append(Right("write", r"rabbitdelay\.undeliverable"))
    undeliverable = SMALL.module_queues.undeliverable
    reasons: dict[str, str] = {}
    url = host.let("worker", rest)
    with Worker(levels(broker_url=url, result_backend=redis_url)):
        # At least once: RabbitMQ closes the channel for one message, and others that were in
        # flight on it are published again.
        while len(reasons) < 6:
            for each in take(host.connection, [undeliverable], 1):
                reasons[each.body] = each.message.headers[headers.REASON]
    # What is left of the five seconds when it is written.
    level = r"rabbitdelay\.(seconds\.x1|ms\.x100|delivery)"
    for body, reason in reasons.items():
        exchange = "news" if body.startswith("forged") else level
        assert re.search(f"lacks the permission write on the exchange '{exchange}'", reason)


# The command.


def test_the_command_prints_json_for_any_application(
    configuration: dict[str, Any], shop: Any
) -> None:
    command = "permissions producer --declare never --topics --user web --vhost shop"
    found = answer(configuration, command, "permissions")
    topology, queues = shop.rabbitdelay.topology, list(shop.amqp.queues.values())
    configure, write, read = patterns(rights("producer", topology, queues, CONF, may_declare=False))
    assert (found["configure"], found["write"], found["read"]) == (configure, write, read)
    assert (found["user"], found["vhost"]) == ("web", "shop")
    assert found["topics"] == [each._asdict() for each in topic_rights(topology, queues)]
