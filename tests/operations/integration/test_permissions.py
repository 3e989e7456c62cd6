"""Each user of the broker works with the rights that the documentation gives it, and no others."""

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import amqp
import celery
import pytest
from amqp.exceptions import AccessRefused
from kombu import Connection, Exchange, Queue

from celery_rabbitdelay import Outcome, exceptions
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import CHECK_IN, DISTRIBUTE, PROBE, Topology
from celery_rabbitdelay.operations.permissions import Rights, commands, rights, topic_rights
from celery_rabbitdelay.publishing.declaration import bind_destination, declare
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from celery_rabbitdelay.testing.servers import PATIENCE
from tests.kernel.integration.arrivals import count, take
from tests.kernel.integration.conftest import LEVELS, SHORT
from tests.kernel.integration.worker import answer
from tests.kernel.unit.clock import frozen
from tests.operations.integration.management import Place, created, node
from tests.operations.integration.permitted_shop import Program, Worker, make_app

__all__ = ["node"]

PAGE: Final = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "permissions.md"
SMALL: Final = Topology("rabbitdelay", SHORT)
CONF: Final = celery.Celery(set_as_current=False).conf
CELERY: Final = Queue("celery", Exchange("celery", type="direct"), "celery")

#: Settings with the small levels, which only operators declare.
NEVER: Final = {"rabbitdelay_layout": LEVELS, "rabbitdelay_declare": "never"}

#: The users of the page's lines, with their role and what they declare.
USERS: Final = {
    "shop-web": ("producer", "auto"),
    "shop-cron": ("producer", "never"),
    "shop-web-only": ("producer --topics", "never"),
    "shop-worker": ("worker", "auto"),
    "shop-worker-only": ("worker", "never"),
    "letter-writer": ("check-in", ""),
    "operator": ("operator", ""),
}


class Host(Place):
    """A virtual host whose users have the permissions that a test gives them, and no others."""

    def named(self, user: str) -> str:
        """Return the name on the broker of a user of this test's own."""
        return f"{user}-{self.name}"

    def url_of(self, user: str) -> str:
        """Return the URL for a user that has permissions."""
        return self.url.replace("guest:guest", f"{self.named(user)}:secret")

    def let(self, user: str, given: Rights, topics: Any = ()) -> str:
        """Give a user permissions, in place of all former ones; return its URL."""
        self.apply(*commands(user, "/", given, topics))
        return self.url_of(user)

    def apply(self, *lines: str, by_program: bool = False) -> None:
        """Do what lines of the page say, for this virtual host and a user of this test's own.

        Args:
            *lines: The lines, commands of ``rabbitmqctl``.
            by_program: Run these; otherwise, the management API does the same in a moment.
        """
        for line in lines:
            _, command, _, _, user, *rest = shlex.split(line)
            name, kind = self.named(user), command.removeprefix("set_").replace("_", "-")
            self.put("users", name, password="secret", tags="")
            first = "exchange" if "topic" in kind else "configure"
            if by_program:
                self.node.ctl(command, "-p", self.name, name, *rest)
            else:
                values = dict(zip((first, "write", "read"), rest, strict=True))
                self.put(kind, self.name, name, **values)


@contextmanager
def host_on(node: RabbitMQServer) -> Iterator[Host]:
    """A virtual host with nothing in it, deleted at the end with its users."""
    with created(Host(node)) as host:
        yield host
        users: list[dict[str, Any]] = host.api.get("users")
        for each in users:
            if each["name"].endswith(host.name):
                host.delete("users", each["name"])


@pytest.fixture
def host(node: RabbitMQServer) -> Iterator[Host]:
    """A virtual host of this test's own."""
    with host_on(node) as host:
        yield host


def needed(role: Any, mode: str, topology: Topology = SMALL, **more: Any) -> Rights:
    return rights(role, topology, [CELERY], CONF, may_declare=mode != "never", **more)


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


def lines_of_page() -> list[str]:
    """Return the commands of the page, in their order."""
    return re.findall(r"^\$ (rabbitmqctl set_\w*permissions .*)$", PAGE.read_text(), re.MULTILINE)


def lines_for(user: str) -> list[str]:
    """Return the commands of the page for a user."""
    return [line for line in lines_of_page() if shlex.split(line)[4] == user]


def test_the_page_shows_what_the_command_prints() -> None:
    topology, expected = Topology(), list[str]()
    for user, (words, mode) in USERS.items():
        role, *only_delayed = words.split()
        topics = topic_rights(topology, [CELERY]) if only_delayed else ()
        given = needed(role, mode, topology, only_delayed=bool(only_delayed))
        expected += commands(user, "/", given, topics)
    assert sorted(lines_of_page()) == sorted(expected)


def test_the_lines_are_commands_of_rabbitmqctl(node: RabbitMQServer) -> None:
    user, found = "shop-web-only", []
    with host_on(node) as one, host_on(node) as other:
        for each in (one, other):
            # RabbitMQ 4.3 refuses a topic permission on an exchange that does not exist.
            Topology().level_exchanges[0](each.connection.default_channel).declare()
            each.apply(*lines_for(user)[:2], by_program=each is one)
            kinds = ("permissions", "topic-permissions")
            has = [each.api.get("users", each.named(user), kind) for kind in kinds]
            assert [len(told) for told in has] == [1, 1]
            found.append(str(has).replace(each.name, "host"))
    assert found[0] == found[1]


class Acting:
    """A user with the lines of the page, and the application as this user has it."""

    def __init__(self, host: Host, user: str, mode: str, redis_url: str) -> None:
        host.apply(*lines_for(user))
        self.host, self.user = host, user
        self.settings: dict[str, Any] = {
            "broker_url": host.url_of(user),
            "result_backend": redis_url,
            "rabbitdelay_registry_url": redis_url,
            "rabbitdelay_registry_options": {"socket_timeout": 10},
            "rabbitdelay_confirm_timeout": 150,
            "rabbitdelay_registry_prefix": host.name,
            "rabbitdelay_declare": mode,
            "rabbitdelay_modules": [CHECK_IN, DISTRIBUTE, PROBE],
            "rabbitdelay_layout": LEVELS,
        }
        if user in ("shop-web-only", "shop-cron"):
            # It may write to the exchanges of the clock, and may not send to distribution.
            self.settings |= {"rabbitdelay_modules": [], "rabbitdelay_layout": "clock"}
        self.app = make_app(self.settings)
        self.remind: Any = self.app.tasks["remind"]

    def command(self, line: str, warning: str = "") -> str:
        """Run a command of ``celery rabbitdelay``, and return what it prints."""
        management = self.host.node.management_url.replace(
            "guest:guest", f"{self.host.named(self.user)}:secret"
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


def send_at_once(acting: Acting) -> None:
    """A task without a delay: Celery publishes it unconfirmed, so a refusal is silent."""
    acting.remind.delay(1)
    take(acting.host.connection, [CELERY], 1)


def send_several(acting: Acting) -> None:
    """Tasks wait."""
    rows = [{"args": (each,), "delay": each % 2} for each in range(20)]
    acting.app.rabbitdelay.send_many("remind", rows, envelopes=False)
    take(acting.host.connection, [CELERY], 20)


def cancel_one(acting: Acting) -> None:
    """A task is cancelled by a call and by the command; a producer does not reach the workers."""
    sender = make_app({**acting.settings, "broker_url": acting.host.url})
    sent = [sender.tasks["remind"].apply_async((1,), delay=600) for _ in range(2)]
    sender.close()
    assert acting.app.rabbitdelay.cancel(sent[0]) is Outcome.NOTED
    not_told = "" if acting.user == "operator" else "workers were not notified"
    said = acting.command(f"cancel {sent[1].id} --also-future", not_told)
    assert said.startswith(f"{sent[1].id}: noted")
    # A refusal leaves nothing broken.
    send_one(acting)


def postpone_one(acting: Acting) -> None:
    """A task is to run later, and then earlier."""
    sender = make_app({**acting.settings, "broker_url": acting.host.url})
    sent = sender.tasks["remind"].apply_async((1,), delay=600, track=True)
    sender.close()
    assert acting.command(f"postpone {sent.id} --delay 900") == f"{sent.id}: done\n"
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
    schedules.put("a", "remind", second, (1,))
    take(acting.host.connection, [CELERY], 1)
    # The first one still waits.
    assert schedules.trigger("a") is not None
    take(acting.host.connection, [CELERY], 1)
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


def delete_all(acting: Acting) -> None:
    """The levels go, and come again for what follows."""
    acting.command("delete --yes", "cannot count the due messages")
    acting.command("declare --queues")


def verify_all(acting: Acting) -> None:
    """Nothing is found that would be a danger."""
    host, name = acting.host, acting.host.named(acting.user)
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
    acting.command("undeliverable export", "messages exported")
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
    "delay": send_at_once,
    "apply_async": send_one,
    "send_many": send_several,
    "cancel": cancel_one,
    "postpone": postpone_one,
    "schedules.put": put_schedules,
    "worker": run_tasks,
    "rabbitdelay_beat": publish_next_occurrences,
    "basic.publish": hand_in,
    "declare": lambda acting: acting.command("declare --queues"),
    "delete": delete_all,
    "status": lambda acting: acting.command("status"),
    "verify": verify_all,
    "undeliverable": bring_back,
    "migrate": migrate_all,
}


def rows_of_page() -> dict[str, list[str]]:
    """Return the actions of each user in the page's table."""
    found, users = {}, {told: user for user, told in USERS.items()}
    for line in PAGE.read_text().partition("| runs |")[2].partition("\n\n")[0].splitlines()[2:]:
        role, mode, actions, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        user = users[role.removesuffix(" client").replace("`", ""), mode.strip('`"')]
        found[user] = re.findall("`(.*?)`", actions)
    assert found.keys() == USERS.keys()
    return found


@pytest.mark.parametrize(("user", "actions"), rows_of_page().items())
def test_each_user_runs_each_of_its_actions_with_the_lines_of_the_page(
    host: Host, redis_url: str, user: str, actions: list[str]
) -> None:
    role, mode = USERS[user]
    if role != "operator" and mode != "auto":
        declared(host, CELERY, topology=Topology() if role.startswith("producer") else SMALL)
    acting = Acting(host, user, mode or "auto", redis_url)
    try:
        for action in actions:
            ACTIONS[action](acting)
    finally:
        acting.app.close()


# The restricted producer.


def forge(exchange: str, key: str, **more: Any) -> amqp.Message:
    """Return a message that asks distribution for an exchange and a key."""
    told = {headers.DUE: 5, headers.EXCHANGE: exchange, headers.ROUTING_KEY: key, **more}
    return amqp.Message("forged", application_headers=told)


def test_a_restricted_producer_cannot_name_another_destination(host: Host) -> None:
    """It may delay tasks for the queue ``celery`` only."""
    declared(host, CELERY, Queue("secret"))
    url = host.let(
        "web", needed("producer", "never", only_delayed=True), topic_rights(SMALL, [CELERY])
    )
    # The last two match no binding, so distribution would look into the headers.
    keys = ("0.0.secret", "0.0.%distribution", "0.0.0.celery", "0.0.celery\n")
    behind = ("unrouted", "meditation", "meditated", "undeliverable")
    for name, key in (*(("delivery", key) for key in keys), *((each, "secret") for each in behind)):
        with Connection(url, transport_options={"confirm_publish": True}) as connection:
            channel: Any = connection.default_channel
            message = forge("", "secret", **{headers.QUEUE: "secret"})
            with pytest.raises(AccessRefused, match=f"(?s)access to .*rabbitdelay.{name}"):
                channel.basic_publish(message, f"rabbitdelay.{name}", key)
    app = make_app({"broker_url": url, "rabbitdelay_modules": [], **NEVER})
    with pytest.raises(
        exceptions.MessageNotPermitted, match=r"lacks the topic permission write"
    ) as caught:
        app.tasks["remind"].apply_async((1,), delay=1, queue="secret")
    # What is left of the second when it is written.
    level, digits = caught.value.permission.name, caught.value.permission.topic
    assert level in {"rabbitdelay.seconds.x1", "rabbitdelay.ms.x100", "rabbitdelay.delivery"}
    assert re.fullmatch(r"\d\.\d\.secret", digits or "")
    assert not caught.value.may_have_arrived
    app.close()
    for queue in (SMALL.module_queues.distribution.name, "secret"):
        assert count(host.connection, queue) == 0


# What the errors name.


@pytest.mark.parametrize("mode", ["auto", "never"])
def test_a_producer_is_told_which_permission_it_lacks(host: Host, mode: str) -> None:
    if mode == "never":
        declared(host, CELERY)
    every = needed("producer", mode, only_delayed=True)
    names = [
        (permission, name)
        for permission, pattern in every._asdict().items()
        for name in (pattern[2:-2].split("|") if pattern else ())
    ]
    # Once the levels are declared, only the queue is.
    names.sort(key=lambda each: not each[1].startswith("rabbitdelay"))
    for permission, name in names:
        left = "|".join(other for each, other in names if each == permission and other != name)
        url = host.let("web", every._replace(**{permission: f"^({left})$" if left else ""}))
        app = make_app({"broker_url": url, **NEVER, "rabbitdelay_declare": mode})
        if mode == "auto":
            with pytest.raises(exceptions.DeclarationNotPermitted) as caught:
                app.tasks["remind"].apply_async((1,), delay=1)
            error: Any = caught.value
            assert not error.may_have_arrived
        else:
            rows = [{"args": (1,), "delay": 0 if name.endswith("delivery") else 1}]
            with frozen(), pytest.raises(exceptions.RowsNotConfirmed) as refused:
                app.rabbitdelay.send_many("remind", rows, envelopes=False)
            error = refused.value.errors[0]
            assert isinstance(error, exceptions.MessageNotPermitted)
            assert refused.value.uncertain == ()
        lacks = error.permission
        assert permission in lacks.permission
        assert re.fullmatch(name, lacks.name), error
        assert (lacks.user, lacks.virtual_host) == (host.named("web"), host.name)
        assert "rabbitmqctl set_permissions" in str(error)
        app.close()


def test_what_a_module_may_not_publish_is_undeliverable_and_its_reason_names_the_permission(
    host: Host, redis_url: str
) -> None:
    declared(host, CELERY)
    channel: Any = host.connection.default_channel
    Exchange("news", type="topic")(channel).declare()
    _, key, _ = SMALL.route(0, DISTRIBUTION)
    for order in range(3):
        message = forge("news", "x")
        message.body = f"forged {order}"
        channel.basic_publish(message, SMALL.delivery.name, key)
    given = needed("worker", "never")
    write = given.write.replace(r"rabbitdelay\..*", r"rabbitdelay\.undeliverable")
    url = host.let("worker", given._replace(write=write))
    reasons: dict[str, str] = {}
    with Worker({"broker_url": url, "result_backend": redis_url, **NEVER}):
        # At least once: RabbitMQ closes the channel for one message, and others that were in
        # flight on it are published again.
        while len(reasons) < 3:
            for each in take(host.connection, [SMALL.module_queues.undeliverable], 1):
                reasons[each.body] = each.message.headers[headers.REASON]
    for reason in reasons.values():
        assert "lacks the permission write on the exchange 'news'" in reason


def test_the_command_prints_json_for_any_application(
    configuration: dict[str, Any], shop: Any
) -> None:
    command = "permissions producer --declare never --topics --user web --vhost shop"
    found = answer(configuration, command, "permissions")
    topology, queues = shop.rabbitdelay.topology, list(shop.amqp.queues.values())
    needed = rights("producer", topology, queues, CONF, may_declare=False, only_delayed=True)
    assert found.items() >= needed._asdict().items()
    assert (found["user"], found["vhost"]) == ("web", "shop")
    assert found["topics"] == [each._asdict() for each in topic_rights(topology, queues)]
