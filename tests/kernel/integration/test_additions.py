"""An addition of an application's own: docs/how-to/additions.md is another one."""

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
from celery import group
from kombu import Connection

from celery_rabbitdelay import AdditionMissing, InvalidSetting, Row, UnknownOption
from celery_rabbitdelay.additions import AddedToRows, AddedToSend, Addition, Entry, Send, add
from celery_rabbitdelay.app import additions
from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.publishing.producer import Delayed
from celery_rabbitdelay.worker.bootsteps import service_maker
from tests.kernel.integration.arrivals import take
from tests.kernel.integration.conftest import LEVELS

PACKAGE = "celery_rabbitdelay"

CONFIRMED: list[tuple[str, str]] = []


class OfTenant(AddedToSend):
    """What happens to a send that has a tenant."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant

    def headers(self, due: Due) -> Mapping[str, Any]:
        return {"x-tenant": self.tenant}

    def confirmed(self, task_id: str, due: Due, delayed: Delayed) -> None:
        CONFIRMED.append((task_id, self.tenant))


class Tenants(Addition):
    """The option ``tenant``."""

    def check(self, options: Mapping[str, Any]) -> None:
        if options["tenant"] != "acme":
            raise UnknownOption("tenant", options["tenant"], "takes 'acme'")

    def to_send(self, send: Send) -> AddedToSend | None:
        tenant = send.added.get("tenant")
        return None if tenant is None else OfTenant(tenant)


class OfRows:
    """What happens to rows that have an option of :class:`Regions`; it does nothing."""

    shared_headers: Mapping[str, object] = {"x-region": "north"}
    needs_each = False

    def take(self, due: Due) -> None: ...

    def with_headers(self, work: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        return work

    def sent(self, row: int, call: Any, content: Any, delayed: Delayed) -> None: ...

    def ended(self, rows: Iterable[int], is_confirmed: bool) -> None: ...

    def close(self) -> None: ...


class Regions(Addition):
    """The options ``region`` and ``zone``; a send with a zone alone has no part of it."""

    asked_with: tuple[Mapping[str, Any], ...] = ()

    def to_send(self, send: Send) -> AddedToSend | None:
        return AddedToSend() if "region" in send.added else None

    def to_rows(
        self, name: str, task: object, options: Mapping[str, Any], fail: Callable[..., None]
    ) -> AddedToRows | None:
        self.asked_with += (options,)
        return OfRows() if "region" in options else None


class Counting:
    """An attribute of ``app.rabbitdelay``."""

    def __init__(self, delays: Any) -> None:
        self.prefix = delays.settings.prefix

    def tenants(self) -> list[str]:
        return [f"{self.prefix}/acme"]


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the addition with the test."""
    for name in ("entries", "settings", "options", "methods", "commands", "services"):
        table = getattr(additions, name)
        monkeypatch.setattr(additions, name, table.copy())
    add(
        Entry(
            "tenants",
            hooks=f"{__name__}:Tenants",
            options=("tenant",),
            methods={f"{__name__}:Counting": ("tenants",)},
        )
    )
    add(Entry("regions", hooks=f"{__name__}:Regions", options=("region", "zone")))
    CONFIRMED.clear()


def test_an_option_of_an_addition_is_checked_and_goes_with_the_message(
    make_shop: Any, make_queue: Any, connection: Connection
) -> None:
    shop = make_shop()
    look, queue = shop.tasks["look"], make_queue(queue_arguments={"x-queue-type": "quorum"})
    with pytest.raises(UnknownOption, match="tenant = 'globex'"):
        look.apply_async(delay=1, tenant="globex")
    task_id = look.apply_async(delay=0.2, tenant="acme", queue=queue).id
    look.apply_async(delay=0.2, queue=queue)
    found = take(connection, [queue], 2)
    told = {each.message.headers["id"]: each.message.headers.get("x-tenant") for each in found}
    assert told.pop(task_id) == "acme"
    assert list(told.values()) == [None]
    assert [(task_id, "acme")] == CONFIRMED
    assert shop.rabbitdelay.tenants() == [f"{shop.rabbitdelay.settings.prefix}/acme"]


def test_an_option_without_effect_is_refused_and_names_the_way_out(
    make_shop: Any, make_queue: Any, connection: Connection
) -> None:
    shop = make_shop()
    look, queue = shop.tasks["look"], make_queue(queue_arguments={"x-queue-type": "quorum"})
    rows = [Row(delay=0.2), Row(delay=0.2)]
    with pytest.raises(UnknownOption, match=r"tenant = 'acme': .* send_many: .* apply_async"):
        shop.rabbitdelay.send_many(look, rows, queue=queue, tenant="acme")
    with pytest.raises(UnknownOption, match=r"tenant = 'acme': .* send_many"):
        shop.rabbitdelay.send_many(look, rows, queue=queue, tenant="acme", region="north")
    with pytest.raises(UnknownOption, match=r"zone = 7: .* this send: leave it out"):
        look.apply_async(delay=0.2, zone=7, queue=queue)
    assert look.apply_async(delay=0.2, zone=False, queue=queue)
    report = shop.rabbitdelay.send_many(look, rows, queue=queue, region="north", zone=7)
    assert report.confirmed == 2
    found = take(connection, [queue], 3)
    told = [each.message.headers.get("x-region") for each in found]
    assert sorted(told, key=str) == [None, "north", "north"]


def test_an_addition_is_asked_with_its_own_options_alone(make_shop: Any, make_queue: Any) -> None:
    shop = make_shop()
    look, queue = shop.tasks["look"], make_queue(queue_arguments={"x-queue-type": "quorum"})
    with pytest.raises(UnknownOption, match="tenant"):
        shop.rabbitdelay.send_many(look, [], queue=queue, tenant="acme", region="north")
    shop.rabbitdelay.send_many(look, [], queue=queue)
    assert shop.rabbitdelay.part(Regions).asked_with == ({"region": "north"}, {})


def test_sends_of_a_block_and_members_of_a_group_are_confirmed_at_its_end(
    make_shop: Any, make_queue: Any, connection: Connection
) -> None:
    shop = make_shop()
    look, queue = shop.tasks["look"], make_queue(queue_arguments={"x-queue-type": "quorum"})
    with shop.rabbitdelay.pipeline():
        look.apply_async(delay=0.2, tenant="acme", queue=queue)
    group([look.s().set(delay=0.2, tenant="acme", queue=queue)] * 2, app=shop).apply_async()
    found = take(connection, [queue], 3)
    assert [each.message.headers["x-tenant"] for each in found] == ["acme"] * 3
    assert CONFIRMED == []


def test_two_additions_do_not_have_one_name() -> None:
    with pytest.raises(ValueError, match="'tenant'"):
        add(Entry("others", options=("tenant",)))


def test_a_worker_may_serve_what_an_addition_of_the_application_brings() -> None:
    with pytest.raises(InvalidSetting, match="services of your own additions"):
        Settings(modules=["distribution", "siren"])
    add(Entry("sirens", services={"siren": f"{__name__}:Counting"}))
    assert Settings(modules=["distribution", "siren"]).modules == ["distribution", "siren"]
    made: Any = service_maker("siren")
    assert made is Counting


def test_what_belongs_to_a_deleted_addition_names_it(make_shop: Any) -> None:
    add(Entry("gone", methods={"celery_rabbitdelay.gone.methods:Gone": ("forgotten",)}))
    with pytest.raises(AdditionMissing, match="has no folder 'gone'"):
        make_shop().rabbitdelay.forgotten()


def test_a_plain_delayed_send_imports_no_addition_and_no_redis(
    broker_url: str, prefix: str, make_topology: Any
) -> None:
    make_topology()
    program = f"""
import sys, celery_rabbitdelay
app = celery_rabbitdelay.Celery("shop", broker={broker_url!r}, set_as_current=False)
app.conf.update(rabbitdelay_prefix={prefix!r}, rabbitdelay_layout={LEVELS!r})
app.conf.update(task_default_queue="{prefix}-queue")
app.send_task("look", delay=1)
print(*sys.modules)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    rooms = {name.split(".")[1] for name in run.stdout.split() if name.startswith(f"{PACKAGE}.")}
    assert rooms <= {"exceptions", "levels", "publishing", "modules", "app"}, rooms
    assert "redis" not in run.stdout.split()
