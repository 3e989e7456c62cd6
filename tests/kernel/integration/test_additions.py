"""An addition of an application's own: docs/how-to/additions.md is another one."""

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from kombu import Connection

from celery_rabbitdelay import AdditionMissing, UnknownOption
from celery_rabbitdelay.additions import AddedToSend, Addition, Entry, Send, add
from celery_rabbitdelay.app import additions
from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.publishing.producer import Delayed
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


class Counting:
    """An attribute of ``app.rabbitdelay``."""

    def __init__(self, delays: Any) -> None:
        self.prefix = delays.settings.prefix

    def tenants(self) -> list[str]:
        return [f"{self.prefix}/acme"]


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the addition with the test."""
    for name in ("entries", "settings", "options", "methods", "commands"):
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


def test_two_additions_do_not_have_one_name() -> None:
    with pytest.raises(ValueError, match="'tenant'"):
        add(Entry("others", options=("tenant",)))


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
