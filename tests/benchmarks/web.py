# ruff: noqa: T201  # a program at the terminal prints
"""What the page costs: the time of each list with a million tracked tasks."""

import time
from datetime import UTC, datetime, timedelta
from functools import partial
from statistics import median
from typing import Any, Final
from urllib.parse import quote
from uuid import uuid4

import httpx

from celery_rabbitdelay import Row
from celery_rabbitdelay.registry.decision import Registration
from celery_rabbitdelay.testing import RedisServer
from tests.benchmarks import measure
from tests.private_broker import private_broker
from tests.web.integration.page import ServedPage

#: Milliseconds that a list may take, as the median.
GOAL_MS: Final = 300.0

#: Seconds from one tracked task to the next: a million wait for two months.
STEP: Final = 5

#: The job that every second task belongs to.
LARGE: Final = "large"


def fill(app: Any, tasks: int) -> datetime:
    """Note tracked tasks; return when the first of them is due."""
    start = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    start_ms = int(start.timestamp()) * 1000
    many = (
        Registration(
            *(str(uuid4()), "copy", start_ms + each * STEP * 1000),
            name="rare" if each % 1000 == 999 else "often",
            queue=f"queue-{each % 6}",
            job=LARGE if each % 2 else f"import-{each // 2 % 1000}",
        )
        for each in range(tasks)
    )
    print(measure.registered(app.rabbitdelay.registry, many))
    rows = [Row(delay=40 * 86_400, key=f"order:{number}") for number in range(5_000)]
    app.rabbitdelay.send_many("at", rows, envelopes=False)
    return start


def addresses(start: datetime, task_id: str) -> dict[str, str]:
    """Return the pages that are measured: what, and their paths."""
    month = f"due:{start.date()}..{(start + 30 * timedelta(1)).date()}"
    both = f"task:often job:{LARGE}"
    lists = (
        *("", f"id:{task_id}", "job:import-7", f"job:{LARGE}", "task:often", "task:r*", both),
        *(f"{both} {month}", "key:*:4711", "4711", "state:overdue", "state:waiting"),
    )
    searches = {query: quote(query) for query in lists}
    others = (
        "now",
        "levels",
        "undeliverable",
        "jobs?name=im*",
        "pauses",
        "schedules",
        "health",
        "work",
    )
    return {
        **{f"Waiting, {query[:40]}": f"/waiting?q={quoted}" for query, quoted in searches.items()},
        "Count, task and large job": f"/waiting/all?action=cancel&q={searches[both]}",
        "Task": f"/waiting/task?id={quote(task_id)}",
        **{each: f"/{each}" for each in others},
    }


def web(*, rounds: int = 15, tasks: int = 1_000_000) -> None:
    """The page with a million tracked tasks: how long each list takes."""
    with private_broker(management=True) as broker, RedisServer() as redis, RedisServer() as other:
        print(measure.about(broker))
        shop = measure.Shop.at(
            *(broker.url, redis.url),
            rabbitdelay_registry_url=other.url,
            rabbitdelay_track="all",
            rabbitdelay_web={"loopback_role": "operator", "management": broker.management_url},
        )
        start = fill(shop.app, tasks)
        first = next(shop.app.rabbitdelay.pending(due_after=start))
        with (
            ServedPage(shop.settings) as page,
            httpx.Client(base_url=f"http://127.0.0.1:{page.port}", timeout=300) as client,
        ):

            def taken(path: str) -> float:
                began = time.perf_counter()
                answer = client.get(path)
                assert answer.status_code == 200, (path, answer.text)
                return (time.perf_counter() - began) * 1000

            paths = addresses(start, first.task_id)
            contestants = {name: partial(taken, path) for name, path in paths.items()}
            measure.in_turn(contestants, 1)
            times = measure.in_turn(contestants, rounds)
    measure.show("Each page", "ms", times)
    print(f"  goal: slowest {max(map(median, times.values())):.0f} ms, at most {GOAL_MS:.0f}")
