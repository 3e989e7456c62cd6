"""Takes the pictures of the page that shows what waits, in a real browser, for ``page.md``.

``make pictures`` runs it. It starts a private RabbitMQ and Redis, a worker and the page, and sends
a shop's tasks for the days to come.

Arguments: a folder, into which pictures of all pages go, instead of the few of the documentation.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import NAMESPACE_URL, uuid5

from kombu import Connection
from PIL import Image

from celery_rabbitdelay import Celery
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.headers import ATTEMPTS, FAILED_SINCE, FIRST_REASON, REASON
from celery_rabbitdelay.testing import RabbitMQServer, RedisServer
from celery_rabbitdelay.web.options import hash_password
from tests.celery_process import CeleryProcess
from tests.chromium import PHONE, WIDE, Chromium, Tab
from tests.operations.integration.undeliverable_messages import message, put, straight

FOLDER: Final = Path(__file__).parent

#: The environment variable in which the worker and the page find their settings.
VARIABLE: Final = "PICTURED_SHOP"

USER, PASSWORD = "ada", "correct horse"

HOUR, DAY = 3600, 86_400

#: The tasks of the shop: how many wait, and for how many seconds, at least and at most.
TASKS: Final = {
    "carts.remind": (900, 600, 3 * HOUR),
    "orders.ask_for_review": (1400, DAY, 14 * DAY),
    "invoices.dun": (420, 7 * DAY, 30 * DAY),
    "newsletter.send": (260, 2 * HOUR, 3 * DAY),
    "subscriptions.renew": (140, 20 * DAY, 360 * DAY),
}

#: Why the undeliverable messages are so, and how many of each.
REASONS: Final = {
    "its queue 'mails' does not exist": 14,
    "its exchange 'partners' does not exist": 3,
    "its arguments cannot be read: unknown content type application/x-old": 2,
}


class Picture(NamedTuple):
    """A picture.

    Attributes:
        name: Its file's name, without the ending.
        path: Which page, with ``{task}`` for the id of a task.
        size: The size of the window.
        scheme: ``light`` or ``dark``.
    """

    name: str
    path: str
    size: tuple[int, int] = WIDE
    scheme: str = "light"


#: The pictures of the documentation.
PICTURES: Final = (
    Picture("page_now", "/now?horizon=day"),
    Picture("page_waiting", "/waiting?q=job:spring-sale"),
    Picture("page_task_dark", "/waiting/task?id={task}", (1400, 760), "dark"),
    Picture("page_now_phone_dark", "/now?horizon=day", PHONE, "dark"),
    Picture("page_waiting_phone", "/waiting?q=task:orders.*", PHONE),
)


def make_app(settings: dict[str, Any]) -> Celery:
    """Create the shop's application."""
    app = Celery("shop", set_as_current=False)
    app.conf.update(worker_hijack_root_logger=False, rabbitdelay_track="all", **settings)
    for name in TASKS:
        app.task(name=name, shared=False)(nothing)
    return app


def nothing(*given: Any) -> None:
    """Do nothing, as any of the tasks."""


if VARIABLE in os.environ:
    app = make_app(json.loads(os.environ[VARIABLE]))


class _Process(CeleryProcess):
    module = "page"
    variable = VARIABLE

    def _environment(self) -> dict[str, str]:
        environment = super()._environment()
        return {**environment, "PYTHONPATH": f"{environment['PYTHONPATH']}:{FOLDER}"}


class Worker(_Process):
    """The shop's worker."""

    def _command(self) -> list[str]:
        return self.celery("worker -c 1 -l INFO -n shop@mail-1 --without-mingle")

    def _ready(self) -> bool:
        return " ready." in self.log


class Page(_Process):
    """The page, served by its command."""

    def _command(self) -> list[str]:
        return self.celery(f"rabbitdelay web --port={self.port}")

    def _ready(self) -> bool:
        return "Uvicorn running" in self.log


def fill(app: Any) -> str:
    """Send what waits; return the id of one of the tasks."""
    chosen = random.Random(4711)  # noqa: S311 - it is no secret
    app.rabbitdelay.open_job("spring-sale", expires=HOUR)
    order = 40_000
    for name, (number, least, most) in TASKS.items():
        for _ in range(number):
            order += 1
            options: dict[str, Any] = {"task_id": id_of(str(order))}
            if name != "newsletter.send":
                options["key"] = f"{name.partition('.')[0]}:{order}"
            elif chosen.random() < 0.7:
                options["job"] = "spring-sale"
            delay = chosen.uniform(least, most)
            app.tasks[name].apply_async((order, "Köln"), delay=delay, **options)
    one = app.tasks["orders.ask_for_review"].apply_async(
        (4711, "Köln"), delay=3 * DAY + 7 * HOUR + 45 * 60 + 30, key="order:4711"
    )
    app.rabbitdelay.commit_job("spring-sale")
    app.rabbitdelay.open_job("import 2031-03-01", expires=2 * HOUR)
    app.rabbitdelay.open_job("price list", expires=DAY)
    for name, task, length in (
        ("nightly report", "invoices.dun", timedelta(days=1)),
        ("carts, each quarter of an hour", "carts.remind", timedelta(minutes=15)),
        ("newsletter", "newsletter.send", timedelta(days=7)),
    ):
        app.rabbitdelay.schedules.put(name, task, length)
    app.rabbitdelay.schedules.pause("newsletter")
    lose(app)
    return str(one.id)


def id_of(text: str) -> str:
    """Return an id that is the same in each run."""
    return str(uuid5(NAMESPACE_URL, text))


def lose(app: Any) -> None:
    """Put messages into undeliverable."""
    with Connection(app.conf.broker_url) as connection:
        for reason, number in REASONS.items():
            for each in range(number):
                own: dict[str, Any] = {
                    "task": "orders.ask_for_review",
                    "lang": "py",
                    REASON: reason,
                }
                own |= {ATTEMPTS: each + 2, FIRST_REASON: reason}
                own[FAILED_SINCE] = wall_clock.ms() - (each + 1) * 3_000_000
                own["argsrepr"] = f"({each + 40_000}, 'Köln')"
                task_id = id_of(f"{reason} {each}")
                lost = message("[]", straight("mails", id=task_id, **own))
                put(connection, app.rabbitdelay.topology, lost)


def all_pages() -> Iterator[Picture]:
    """Yield pictures of all pages, wide and narrow, light and dark."""
    paths = {
        "now": "/now?horizon=day",
        "waiting": "/waiting",
        "task": "/waiting/task?id={task}",
        "all": "/waiting/all?action=cancel&q=job:spring-sale",
        "undeliverable": "/undeliverable",
        "jobs": "/jobs?name=spring-sale",
        "schedules": "/schedules",
        "schedule": "/schedules/one?name=nightly%20report",
        "health": "/health",
        "work": "/work",
        "error": "/nowhere",
    }
    for name, path in paths.items():
        yield Picture(f"{name}_wide_light", path)
        yield Picture(f"{name}_phone_dark", path, PHONE, "dark")


def take(tab: Tab, picture: Picture, task: str, folder: Path, *, whole: bool) -> None:
    """Take a picture of the window, or of a page as a whole."""
    tab.resize(picture.size)
    tab.prefer(picture.scheme)
    tab.go(picture.path.format(task=task))
    tab.see("rabbitdelay")
    if whole:
        width, _ = picture.size
        height = tab.run("return document.documentElement.scrollHeight")
        tab.resize((width, min(height, 4000)))
    colors = (
        Image.open(BytesIO(tab.picture())).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    )
    colors.save(folder / f"{picture.name}.png", optimize=True)


def main(folder: Path, pictures: list[Picture], *, whole: bool) -> None:
    """Take pictures into a folder."""
    with ExitStack() as stack:
        broker = stack.enter_context(RabbitMQServer(management=True))
        redis = stack.enter_context(RedisServer())
        users = {USER: {"password": hash_password(PASSWORD), "role": "operator"}}
        settings = {
            "broker_url": broker.url,
            "result_backend": redis.url,
            "rabbitdelay_registry_url": redis.url,
            "rabbitdelay_web": {
                "users": users,
                "management": broker.management_url,
                "shows_arguments": True,
            },
        }
        stack.enter_context(Worker(settings))
        page = stack.enter_context(Page(settings))
        app = make_app(settings)
        task = fill(app)
        app.close()
        tab = stack.enter_context(
            stack.enter_context(Chromium()).tab(f"http://localhost:{page.port}")
        )
        tab.go("/now")
        tab.fill("Name", USER)
        tab.fill("Password", PASSWORD)
        tab.press("Sign in")
        tab.see("shop@mail-1")
        for each in pictures:
            take(tab, each, task, folder, whole=whole)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), list(all_pages()), whole=True)
    else:
        main(FOLDER, list(PICTURES), whole=False)
