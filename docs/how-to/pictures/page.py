"""Takes the pictures of the page that shows what waits, in a real browser, for ``page.md``.

``make pictures`` runs it. It starts a private RabbitMQ and Redis, two workers and the page, and
sends a shop's tasks for the days to come: 12 tasks in 6 queues, 40,000 that wait, 300 that are
held, 30 undeliverable messages, 12 schedules, 20 jobs, and a queue that no worker serves.

Arguments: a folder, into which pictures of all pages go, wide and narrow, light and dark, instead
of the few of the documentation.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import NAMESPACE_URL, uuid5

from celery.signals import worker_ready
from kombu import Connection
from PIL import Image

from celery_rabbitdelay import Celery
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.headers import ATTEMPTS, DUE, FAILED_SINCE, FIRST_REASON, REASON
from celery_rabbitdelay.operations import worker_status
from celery_rabbitdelay.operations.worker_status import Step
from celery_rabbitdelay.testing import RabbitMQServer, RedisServer
from celery_rabbitdelay.web import now
from celery_rabbitdelay.web.options import hash_of
from tests.celery_process import CeleryProcess
from tests.chromium import PHONE, Chromium, Tab
from tests.operations.integration.undeliverable_messages import message, put, straight

FOLDER: Final = Path(__file__).parent

#: The environment variable in which the workers and the page find their settings.
VARIABLE: Final = "PICTURED_SHOP"

USER, PASSWORD = "ada", "correct horse"

#: A window of a laptop.
WIDE: Final = (1280, 800)

MINUTE, HOUR, DAY = 60, 3600, 86_400


class Pictured(NamedTuple):
    """A task of the shop.

    Attributes:
        queue: Its queue.
        number: How many wait.
        least: Seconds for which they wait at least.
        most: And at most.
    """

    queue: str
    number: int
    least: float
    most: float


#: The tasks of the shop.
TASKS: Final = {
    "newsletter.send": Pictured("mail", 9_200, 2 * HOUR, 3 * DAY),
    "orders.ask_for_review": Pictured("mail", 7_100, DAY, 14 * DAY),
    "carts.remind": Pictured("mail", 5_900, 10 * MINUTE, 3 * HOUR),
    "sessions.expire": Pictured("default", 5_200, MINUTE, 2 * HOUR),
    "invoices.dun": Pictured("billing", 4_150, 7 * DAY, 30 * DAY),
    "subscriptions.renew": Pictured("billing", 2_400, 20 * DAY, 360 * DAY),
    "stock.release": Pictured("stock", 1_750, MINUTE, 40 * MINUTE),
    "search.reindex": Pictured("search", 1_500, 2 * MINUTE, DAY),
    "payments.retry": Pictured("billing", 1_050, 2 * MINUTE, 6 * HOUR),
    "prices.apply": Pictured("stock", 900, 3 * HOUR, 2 * DAY),
    "partners.export": Pictured("partners", 550, 4 * MINUTE, DAY),
    "reports.build": Pictured("default", 300, 5 * MINUTE, 7 * DAY),
}

#: Which queues each worker serves; nobody serves "search".
WORKERS: Final = {"shop@mail-1": "mail,default", "shop@core-1": "billing,stock,partners"}

#: Why the undeliverable messages are so, and how many of each.
REASONS: Final = {
    "its queue 'mails' does not exist": 19,
    "its exchange 'partners' does not exist": 7,
    "its arguments cannot be read: unknown content type application/x-old": 4,
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
    Picture("page_now", "/now"),
    Picture("page_waiting", "/waiting?q=queue:mail+due:<2h"),
    Picture("page_task_dark", "/waiting/task?id={task}", WIDE, "dark"),
    Picture("page_now_phone_dark", "/now", PHONE, "dark"),
    Picture("page_waiting_phone", "/waiting?q=task:orders.ask_for_review", PHONE),
    Picture("page_levels", "/levels"),
)


def make_app(settings: dict[str, Any]) -> Celery:
    """Create the shop's application."""
    app = Celery("shop", set_as_current=False)
    app.conf.update(
        worker_hijack_root_logger=False,
        rabbitdelay_track="all",
        task_create_missing_queues=True,
        task_routes={name: {"queue": each.queue} for name, each in TASKS.items()},
        **settings,
    )
    for name in TASKS:
        app.task(name=name, shared=False)(nothing)
    return app


def nothing(*given: Any) -> None:
    """Do nothing, as any of the tasks."""


def remember(sender: Any, **options: Any) -> None:
    """Let a worker remember an hour that it has not seen: pictures cannot wait for it."""
    arrivals = sender.controller.rabbitdelay_arrivals
    chosen, step = random.Random(7), worker_status._step_now()  # noqa: S311 - no secret
    for ago in range(1, 60):
        late = chosen.uniform(0.05, 0.4) + (6.0 - abs(ago - 24) if 20 < ago < 28 else 0)
        arrivals._steps[step - ago] = Step(chosen.randint(70, 110) + ago // 2, late)
    for name, task in TASKS.items():
        if task.queue != "search":
            bounds = [chosen.randint(200, 900), 40, 12, 9, 1, 0, 0, 0, 0, 0, 0, 0, 0]
            arrivals._steps[step - 1].by_task[name] = bounds


def sent(*given: Any) -> list[tuple[datetime, float]]:
    """Return what was sent in each minute of that hour."""
    end, chosen = wall_clock.now(), random.Random(11)  # noqa: S311 - no secret
    return [
        (end - timedelta(minutes=ago, seconds=-20), chosen.uniform(170, 260))
        for ago in range(59, 0, -1)
    ]


if VARIABLE in os.environ:
    app = make_app(json.loads(os.environ[VARIABLE]))
    worker_ready.connect(remember, weak=False)
    now._sent = sent


class _Process(CeleryProcess):
    module = "page"
    variable = VARIABLE

    def _environment(self) -> dict[str, str]:
        environment = super()._environment()
        return {**environment, "PYTHONPATH": f"{environment['PYTHONPATH']}:{FOLDER}"}


class Worker(_Process):
    """A worker of the shop."""

    def __init__(self, settings: dict[str, Any], name: str) -> None:
        super().__init__(settings)
        self._name = name

    def _command(self) -> list[str]:
        queues = WORKERS[self._name]
        return self.celery(f"worker -c 1 -l INFO -n {self._name} -Q {queues} --without-mingle")

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
    chosen, delays = random.Random(4711), app.rabbitdelay  # noqa: S311 - it is no secret
    with Connection(app.conf.broker_url) as connection:
        for queue in {each.queue for each in TASKS.values()}:
            app.amqp.queues[queue](connection.default_channel).declare()
    order = 40_000
    for name, task in TASKS.items():
        first, order = order, order + task.number
        rows = [
            {
                "task_id": id_of(str(each)),
                "args": (each, "Köln"),
                "key": f"{name.partition('.')[0]}:{each}",
                # More of them soon than late.
                "delay": task.least + (task.most - task.least) * chosen.random() ** 1.5,
            }
            for each in range(first, order)
        ]
        delays.send_many(app.tasks[name], rows, envelopes=False)
    one = app.tasks["orders.ask_for_review"].apply_async(
        (4711, "Köln"), delay=3 * DAY + 7 * HOUR + 45 * MINUTE + 30, key="order:4711"
    )
    delays.postpone(one.id, delay=3 * DAY + 9 * HOUR + 45 * MINUTE + 30)
    hold(app)
    schedule(app)
    lose(app)
    return str(one.id)


def hold(app: Any) -> None:
    """Open jobs and end most of them, pause a queue, cancel tasks, and let some be overdue."""
    delays = app.rabbitdelay
    for number in range(1, 19):
        job = f"import-2026-11-{number:02}"
        with delays.job(job, expires=2 * DAY):
            for each in range(3):
                args, delay = (number, each), (number + each) * HOUR
                app.tasks["prices.apply"].apply_async(args, delay=delay, job=job)
    delays.open_job("import-2026-11-19", expires=DAY)
    delays.abort_job("import-2026-11-19")
    delays.open_job("spring sale", expires=2 * HOUR)
    delays.pause(queue="partners")
    soon = [{"args": (each,), "delay": 1 + each / 100} for each in range(240)]
    delays.send_many(app.tasks["partners.export"], soon, envelopes=False)
    for each in range(60):
        app.tasks["prices.apply"].apply_async((each,), delay=1, job="spring sale")
    for each in range(25):
        app.tasks["search.reindex"].apply_async((each,), delay=1)
    for _ in range(35):
        delays.cancel(app.tasks["newsletter.send"].apply_async((0,), delay=HOUR).id)


def schedule(app: Any) -> None:
    """Put twelve schedules, of which one is paused."""
    names = {
        "carts: remind": ("carts.remind", timedelta(minutes=15)),
        "sessions: expire": ("sessions.expire", timedelta(hours=1)),
        "stock: release": ("stock.release", timedelta(minutes=30)),
        "payments: retry": ("payments.retry", timedelta(hours=2)),
        "search: reindex": ("search.reindex", "0 */6 * * *"),
        "prices: apply": ("prices.apply", "0 0 * * *"),
        "partners: export": ("partners.export", "30 4 * * *"),
        "nightly report": ("reports.build", "15 2 * * *"),
        "weekly report": ("reports.build", "0 7 * * 1"),
        "invoices: dun": ("invoices.dun", "0 9 * * 1-5"),
        "subscriptions: renew": ("subscriptions.renew", "0 3 1 * *"),
        "newsletter": ("newsletter.send", "0 10 * * 4"),
    }
    for name, (task, when) in names.items():
        app.rabbitdelay.schedules.put(name, task, when)
    app.rabbitdelay.schedules.pause("newsletter")


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
                own[DUE] = own[FAILED_SINCE] - 2_000
                own["argsrepr"] = f"({each + 40_000}, 'Köln')"
                task_id = id_of(f"{reason} {each}")
                lost = message("[]", straight("mails", id=task_id, **own))
                put(connection, app.rabbitdelay.topology, lost)


def all_pages() -> Iterator[Picture]:
    """Yield pictures of all pages, wide and narrow, light and dark."""
    paths = {
        "now": "/now",
        "now_queues": "/now?by=queue&horizon=week",
        "waiting": "/waiting",
        "waiting_found": "/waiting?q=queue:mail+due:<2h",
        "task": "/waiting/task?id={task}",
        "all": "/waiting/all?action=cancel&q=queue:partners",
        "jobs": "/jobs",
        "pauses": "/pauses",
        "schedules": "/schedules",
        "schedule": "/schedules/one?name=nightly%20report",
        "undeliverable": "/undeliverable",
        "levels": "/levels",
        "workers": "/workers",
        "health": "/health",
        "work": "/work",
        "error": "/nowhere",
    }
    for name, path in paths.items():
        for word, size in (("wide", WIDE), ("phone", PHONE)):
            for scheme in ("light", "dark"):
                yield Picture(f"{name}_{word}_{scheme}", path, size, scheme)


def take(tab: Tab, picture: Picture, task: str, folder: Path, *, whole: bool) -> None:
    """Take a picture of the window, or of a page as a whole."""
    tab.resize(picture.size)
    tab.prefer(picture.scheme)
    tab.go(picture.path.format(task=task))
    tab.see("rabbitdelay")
    for awaited in ("being asked", "being checked"):
        tab.see_no(awaited)
    if whole:
        width, _ = picture.size
        height = tab.run("return document.documentElement.scrollHeight")
        tab.resize((width, min(height, 4000)))
    colors = (
        Image.open(BytesIO(tab.picture())).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    )
    colors.save(folder / f"{picture.name}.png", optimize=True)


@contextmanager
def served_shop() -> Iterator[tuple[dict[str, Any], str]]:
    """Serve the shop without its page; yield its settings and the id of a task."""
    with ExitStack() as stack:
        broker = stack.enter_context(RabbitMQServer(management=True))
        redis = stack.enter_context(RedisServer())
        users = {USER: {"password": hash_of(PASSWORD), "role": "operator"}}
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
        for name in WORKERS:
            stack.enter_context(Worker(settings, name))
        app = make_app(settings)
        task = fill(app)
        app.close()
        yield settings, task


def main(folder: Path, pictures: list[Picture], *, whole: bool) -> None:
    """Take pictures into a folder."""
    with ExitStack() as stack:
        settings, task = stack.enter_context(served_shop())
        page = stack.enter_context(Page(settings))
        chromium = stack.enter_context(Chromium())
        tab = stack.enter_context(chromium.tab(f"http://localhost:{page.port}"))
        tab.sign_in(USER, PASSWORD)
        tab.see("tasks overdue:", "tasks held:", "≤")  # the lateness of tasks that have run
        for each in pictures:
            take(tab, each, task, folder, whole=whole)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), list(all_pages()), whole=True)
    else:
        main(FOLDER, list(PICTURES), whole=False)
