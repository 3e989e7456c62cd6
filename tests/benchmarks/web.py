# ruff: noqa: T201  # a program at the terminal prints
"""What the page costs: the time of each list, and what viewers ask of broker, Redis and workers.

Viewers do what a browser does: each has every page open, and asks for those that refresh as often
as their script does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from statistics import median, quantiles
from threading import Event
from typing import Any, Final
from urllib.parse import quote, urlencode
from uuid import uuid4

import httpx

from celery_rabbitdelay import Row
from celery_rabbitdelay.registry.registry import Registration
from celery_rabbitdelay.testing import RedisServer
from celery_rabbitdelay.web.pages import PAGES
from tests.benchmarks import measure
from tests.integration.page import ServedPage
from tests.integration.worker import Worker
from tests.private_broker import private_broker

#: Milliseconds that a list may take, as the median.
GOAL_MS: Final = 300.0

#: Seconds from one tracked task to the next: a million wait for two months.
STEP: Final = 5

#: Tasks a second whose lateness is measured.
RATE: Final = 20

#: The job that every second task belongs to.
LARGE: Final = "large"


def fill(app: Any, tasks: int) -> datetime:
    """Note tracked tasks; return when the first of them is due."""
    start = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    start_ms = int(start.timestamp()) * 1000
    many = (
        Registration(
            str(uuid4()),
            "copy",
            start_ms + each * STEP * 1000,
            name="rare" if each % 1000 == 999 else "often",
            job=LARGE if each % 2 else f"import-{each // 2 % 1000}",
        )
        for each in range(tasks)
    )
    print(measure.registered(app.rabbitdelay.registry, many))
    rows = [Row(delay=40 * 86_400, key=f"order:{number}") for number in range(5_000)]
    app.rabbitdelay.send_many("at", rows, envelopes=False)
    return start


def addresses(start: datetime, task_id: str) -> dict[str, str]:
    """Return what is measured, and its path."""
    month = {"due_after": start.isoformat(), "due_before": (start + 30 * timedelta(1)).isoformat()}
    lists: dict[str, dict[str, str]] = {
        "first page": {},
        "by id": {"id": task_id},
        "by job": {"job": "import-7"},
        "by large job": {"job": LARGE},
        "by task's name": {"task": "often"},
        "task and large job": {"task": "often", "job": LARGE},
        "task, job, large, month": {"task": "often", "job": LARGE, **month},
    }
    return {
        **{f"Waiting, {name}": f"/waiting?{urlencode(of)}" for name, of in lists.items()},
        "Count, task and large job": f"/waiting/all?action=cancel&task=often&job={LARGE}",
        "Task": f"/waiting/task?id={quote(task_id)}",
        "Now": "/now",
        "Undeliverable": "/undeliverable",
        "Jobs": f"/jobs?name={LARGE}",
        "Schedules": "/schedules",
        "Health": "/health",
        "Progress": "/work",
    }


def show_times(address: str, paths: Mapping[str, str], rounds: int) -> None:
    """Print the milliseconds of each page ; the first look at it is left out."""
    with httpx.Client(base_url=address, timeout=measure.PATIENCE) as client:

        def taken(path: str) -> float:
            began = time.perf_counter()
            answer = client.get(path)
            assert answer.status_code == 200, (path, answer.text)
            return (time.perf_counter() - began) * 1000

        contestants = {name: partial(taken, path) for name, path in paths.items()}
        measure.in_turn(contestants, 1)
        times = measure.in_turn(contestants, rounds)
    measure.show("Each page", "ms", times)
    slowest = max(map(median, times.values()))
    print(f"  goal: the slowest takes {slowest:.0f} ms, at most {GOAL_MS:.0f}")


@contextmanager
def viewing(address: str, paths: Sequence[str], viewers: int) -> Iterator[list[str]]:
    """Let viewers have pages open; yield a list that grows by each page that they get."""
    stopping, got = Event(), list[str]()
    refreshed = {f"/{page.path}": page.refresh for page in PAGES}

    def watch(path: str, part: float) -> None:
        """Open a page, and refresh it as its script does; viewers come one after the other."""
        seconds, headers = refreshed[path.partition("?")[0]], dict[str, str]()
        stopping.wait(part * (seconds or 2))
        with httpx.Client(base_url=address, timeout=measure.PATIENCE) as client:
            while not stopping.is_set():
                client.get(path, headers=headers).raise_for_status()
                got.append(path)
                headers = {"HX-Request": "true"}
                stopping.wait(seconds or measure.PATIENCE)

    with ThreadPoolExecutor(viewers * len(paths) + 1) as threads:
        every = [(path, each / viewers) for each in range(viewers) for path in paths]
        watching = [threads.submit(watch, *each) for each in every]
        try:
            yield got
        finally:
            stopping.set()
    for each in watching:
        each.result()


def asked(app: Any, broker: Any) -> tuple[int, int]:
    """Return the commands to Redis and the frames of the broker until now."""
    (found,) = app.rabbitdelay.registry.store.commands(lambda pipe: pipe.info("commandstats"))
    unasked = ("cmdstat_info", "cmdstat_ping")
    commands = sum(each["calls"] for name, each in found.items() if name not in unasked)
    frames = broker.ctl("list_connections", "recv_cnt", "--silent").split()
    return commands, sum(map(int, frames))


def lateness(shop: measure.Shop, seconds: float) -> list[float]:
    """Return how late tasks ran that were due one after the other, in milliseconds."""
    key, start, number = uuid4().hex, time.time() + 5, int(seconds * RATE)
    due = [start + each / RATE for each in range(number)]
    rows = (Row((at * 1000,), {"key": key}, eta=datetime.fromtimestamp(at, UTC)) for at in due)
    shop.app.rabbitdelay.send_many("note", rows, envelopes=False)
    return shop.late(key, number)


def web(
    *,
    rounds: int = 15,
    tasks: int = 1_000_000,
    viewers: int = 20,
    seconds: float = 180.0,
    late_seconds: float = 60.0,
) -> None:
    """The page with a million tracked tasks: each list, and what twenty viewers cost."""
    with private_broker(management=True) as broker, RedisServer() as redis, RedisServer() as other:
        print(measure.about(broker))
        shop = measure.Shop.at(
            *(broker.url, redis.url),
            rabbitdelay_registry_url=other.url,
            rabbitdelay_track="all",
            rabbitdelay_web={"loopback_role": "operator", "management": broker.management_url},
        )
        app = shop.app
        start = fill(app, tasks)
        first = next(app.rabbitdelay.pending(due_after=start))
        paths = addresses(start, first.task_id)
        with ServedPage(shop.settings) as page:
            address = f"http://127.0.0.1:{page.port}"
            show_times(address, paths, rounds)
            pages = [
                path for path in paths.values() if "waiting?" not in path and "all?" not in path
            ]
            pages.append("/waiting")
            for number in (0, 1, viewers):
                with viewing(address, pages, number) as got:
                    time.sleep(5)  # the pages are open
                    before = len(got), *asked(app, broker)
                    time.sleep(seconds)
                    after = len(got), *asked(app, broker)
                pairs = zip(("pages", "Redis", "AMQP frames"), before, after, strict=True)
                rates = (f"{(then - now) / seconds:.1f} {what}" for what, now, then in pairs)
                print(f"{number} viewers, a second: {', '.join(rates)}")
            with Worker(shop.settings):
                lateness(shop, 5)
                for number in (0, viewers) * 3:
                    with viewing(address, pages, number):
                        late = lateness(shop, late_seconds)
                    p99 = quantiles(late, n=100)[98]
                    print(f"{number} viewers: late by {median(late):.1f} ms, 99 % by {p99:.1f} ms")
