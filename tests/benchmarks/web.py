# ruff: noqa: T201  # a program at the terminal prints
"""What the page costs: the time of each list, and what viewers ask of broker, Redis and workers.

``python -m tests.benchmarks.web`` starts private servers, notes a million tracked tasks in Redis,
and serves the page by its command, in a process of its own. Viewers do what a browser does: each
has every page open, and asks for those that refresh as often as their script does. ``--seconds
3600`` leaves the pages of the many viewers open for an hour.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median, quantiles
from threading import Event, Thread
from typing import Any, Final, NamedTuple
from urllib.error import HTTPError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import Request, urlopen
from uuid import uuid4

import httpx
from kombu import Connection

from celery_rabbitdelay import Row
from celery_rabbitdelay.kombu import declare
from celery_rabbitdelay.registry.registry import Registration, Registry
from celery_rabbitdelay.testing import RabbitMQServer, RedisServer, wait_for
from celery_rabbitdelay.testing.servers import free_port
from celery_rabbitdelay.web.pages import PAGES
from tests.benchmarks import measure
from tests.benchmarks.measure import Target
from tests.benchmarks.registry import used
from tests.integration.shop import make_app
from tests.integration.worker import Worker, start_celery
from tests.private_broker import private_broker

#: Milliseconds that a list may take, as the median.
GOAL_MS: Final = 300.0

#: How often each page is asked for in :func:`page_times`.
ROUNDS: Final = 15

#: What 20 viewers may ask for, as a multiple of what one asks for. Health is looked at once a
#: minute at most; one viewer, whose page asks every 30 seconds, may come a moment too early.
AS_ONE: Final = 2.0

PATIENCE: Final = 300.0

#: For how many seconds nobody and one viewer look, at most.
FEW_SECONDS: Final = 180.0

#: Registrations in one call, while the index is filled.
CHUNK: Final = 1000

#: Seconds from one tracked task to the next: a million wait for two months.
STEP: Final = 5

#: Tasks a second whose lateness is measured.
RATE: Final = 20

#: The jobs: each has one task of this many, and the large one every second task.
JOBS: Final = 1000
LARGE: Final = "large"


#: How many more are due at the same instant, behind all others.
TOGETHER: Final = 50_000

#: The pages that each viewer has open.
OPEN: Final = (
    *("Waiting, first page", "Task", "Now", "Undeliverable", "Jobs", "Schedules", "Health"),
    "Progress",
)


class Place(NamedTuple):
    """Where everything runs.

    Attributes:
        app: The application.
        settings: What makes it in another process.
        broker: RabbitMQ.
        registry: The Redis of the registry.
        management: Counts the requests to the management API.
    """

    app: Any
    settings: dict[str, Any]
    broker: RabbitMQServer
    registry: RedisServer
    management: Counter


class Counter:
    """Passes requests on to the management API, and counts them.

    Args:
        target: Its URL.
    """

    def __init__(self, target: str) -> None:
        self.requests = 0
        counter, credentials = self, urlsplit(target).netloc.rpartition("@")[0]
        target = target.replace(f"{credentials}@", "", 1)

        class Passing(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                """Pass a request on."""
                counter.requests += 1
                headers = {
                    name: value
                    for name, value in self.headers.items()
                    if name.lower() in ("authorization", "accept")
                }
                try:
                    with urlopen(Request(target + self.path, headers=headers)) as answer:
                        status, body = answer.status, answer.read()
                except HTTPError as refused:
                    status, body = refused.code, refused.read()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Passing)
        self.url = f"http://guest:guest@127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def a_place() -> Iterator[Place]:
    """Start the servers, and declare what the application needs."""
    prefix = f"bench-{uuid4().hex[:8]}"
    with private_broker(management=True) as broker, RedisServer() as redis, RedisServer() as other:
        counter = Counter(broker.management_url)
        settings: dict[str, Any] = {
            "prefix": prefix,
            "broker_url": broker.url,
            "result_backend": redis.url,
            "task_ignore_result": True,
            "rabbitdelay_prefix": prefix,
            "rabbitdelay_registry_url": other.url,
            "rabbitdelay_track": "all",
            "rabbitdelay_web": {"loopback_role": "operator", "management": counter.url},
        }
        app: Any = make_app(settings)
        with Connection(broker.url) as connection:
            declare(connection, app.rabbitdelay.topology)
        try:
            yield Place(app, settings, broker, other, counter)
        finally:
            counter.close()


@contextmanager
def served(place: Place) -> Iterator[tuple[str, int]]:
    """Serve the page by its command; yield its address and the id of its process."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    process = start_celery(place.settings, f"rabbitdelay web --port {port}")
    try:

        def answers() -> bool:
            try:
                return httpx.get(f"{address}/api/session").status_code == 200
            except httpx.TransportError:
                assert process.poll() is None, "the page has ended"
                return False

        wait_for(answers, "the page", PATIENCE)
        yield address, process.pid
    finally:
        process.terminate()
        process.wait(PATIENCE)


def fill(place: Place, tasks: int) -> datetime:
    """Note tracked tasks; return when the first of them is due."""
    registry: Registry = place.app.rabbitdelay.registry
    start = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    start_ms = int(start.timestamp()) * 1000
    before, began = used(registry), time.monotonic()
    for first in range(0, tasks, CHUNK):
        registry.register(
            [
                Registration(
                    str(uuid4()),
                    "copy",
                    start_ms + number * STEP * 1000,
                    name="rare" if number % 1000 == 999 else "often",
                    job=LARGE if number % 2 else f"import-{number // 2 % JOBS}",
                )
                for number in range(first, min(first + CHUNK, tasks))
            ]
        )
    seconds = time.monotonic() - began
    size = (used(registry) - before) / tasks
    print(f"noted {tasks:,} tasks: {tasks / seconds:,.0f} a second, {size:,.0f} bytes each")
    together_ms = start_ms + (tasks + 1) * STEP * 1000
    for _ in range(0, TOGETHER, CHUNK):
        registry.register(
            [Registration(str(uuid4()), "copy", together_ms, name="together") for _ in range(CHUNK)]
        )
    rows = [Row(delay=40 * 86_400, key=f"order:{number}") for number in range(5_000)]
    place.app.rabbitdelay.send_many("at", rows, envelopes=False)
    return start


def addresses(start: datetime, tasks: int, task_id: str) -> dict[str, str]:
    """Return what is measured, and its address without the path of the page."""
    middle = start + timedelta(seconds=STEP * tasks / 2)
    hour = {
        "due_after": middle.isoformat(),
        "due_before": (middle + timedelta(hours=1)).isoformat(),
    }
    month = {
        "due_after": start.isoformat(),
        "due_before": (start + timedelta(days=30)).isoformat(),
    }
    together = int((start + timedelta(seconds=(tasks + 1) * STEP)).timestamp() * 1000)
    late = f"{int(middle.timestamp() * 1000)}:"
    waiting = {
        "first page": {},
        "page in the middle": {"after": late},
        "page of those due at once": {"task": "together", "after": f"{together}:8"},
        "page of 500": {"limit": "500"},
        "by id": {"id": task_id},
        "by key": {"key": "order:4711"},
        "by start of keys": {"key": "order:47*"},
        "by job": {"job": "import-7"},
        "by large job": {"job": LARGE},
        "by task's name": {"task": "often"},
        "by rare task's name": {"task": "rare"},
        "by no task's name": {"task": "none"},
        "due in an hour": hour,
        "due in a month": month,
        "task and job": {"task": "often", "job": "import-7"},
        "task and large job": {"task": "often", "job": LARGE},
        "task and job, none": {"task": "rare", "job": "import-7"},
        "task and job in a month": {"task": "often", "job": "import-7", **month},
        "task, job, large, month": {"task": "often", "job": LARGE, **month},
    }
    found = {f"Waiting, {name}": f"/waiting?{urlencode(of)}" for name, of in waiting.items()}
    return {
        **found,
        "Count of all": "/waiting/all?action=cancel",
        "Count, task and large job": f"/waiting/all?action=cancel&task=often&job={LARGE}",
        "Task": f"/waiting/task?id={quote(task_id)}",
        "Now": "/now",
        "Now, year": "/now?horizon=year",
        "Undeliverable": "/undeliverable",
        "Jobs": f"/jobs?name={LARGE}",
        "Schedules": "/schedules",
        "Health": "/health",
        "Progress": "/work",
    }


def page_times(address: str, paths: dict[str, str], rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each page and of its JSON; first looks at the broker excluded."""
    times: dict[str, list[float]] = {}
    with httpx.Client(base_url=address, timeout=PATIENCE) as client:

        def ask(path: str) -> httpx.Response:
            answer = client.get(path)
            assert answer.status_code == 200, (path, answer.text)
            return answer

        following = ask("/api/waiting").json()["next_address"]
        paths = {**paths, "Waiting, next page": f"/waiting?{following}"}
        for path in paths.values():
            ask(path)
        for _ in range(rounds):
            for name, path in paths.items():
                for kind, prefix in (("page", ""), ("JSON", "/api")):
                    began = time.perf_counter()
                    ask(prefix + path)
                    taken = (time.perf_counter() - began) * 1000
                    times.setdefault(f"{name} ({kind})", []).append(taken)
    return times


class Viewers:
    """Viewers, each of whom has every page open.

    Args:
        address: Where the page is.
        paths: The addresses of the pages.
        number: How many viewers.
    """

    def __init__(self, address: str, paths: Sequence[str], number: int) -> None:
        self._address = address
        self._paths = paths
        self._number = number
        self._stopping = Event()
        self._threads: list[Thread] = []
        self.times: list[float] = []
        self.failures: list[object] = []

    def __enter__(self) -> Viewers:
        every = {f"/{page.path}": page.refresh for page in PAGES}
        for viewer in range(self._number):
            for path in self._paths:
                seconds = every[path.partition("?")[0]]
                self._threads.append(
                    Thread(target=self._watch, args=(path, seconds, viewer / self._number))
                )
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for each in self._threads:
            each.join()

    def _watch(self, path: str, seconds: int, part: float) -> None:
        """Open a page, and refresh it as its script does; viewers come one after the other."""
        self._stopping.wait(part * (seconds or 2))
        with httpx.Client(base_url=self._address, timeout=PATIENCE) as client:
            headers: dict[str, str] = {}
            while not self._stopping.is_set():
                began = time.perf_counter()
                try:
                    answer = client.get(path, headers=headers)
                    self.times.append((time.perf_counter() - began) * 1000)
                    if answer.status_code != 200:
                        self.failures.append((path, answer.status_code))
                except httpx.TransportError as error:
                    self.failures.append((path, error))
                headers = {"HX-Request": "true"}
                if not seconds:
                    return
                self._stopping.wait(seconds)


class Asked(NamedTuple):
    """What was asked in a while, a second.

    Attributes:
        pages: Requests to the page.
        management: Requests to the management API.
        redis: Commands to the Redis of the registry.
        broker: Frames that the broker has got over AMQP.
    """

    pages: float
    management: float
    redis: float
    broker: float


def asked(place: Place, address: str, paths: Sequence[str], viewers: int, seconds: float) -> Asked:
    """Return what some viewers let the page ask."""
    with Viewers(address, paths, viewers) as watching:
        time.sleep(5)  # the pages are open
        before, pages, began = counts(place), len(watching.times), time.monotonic()
        time.sleep(seconds)
        after, pages = counts(place), len(watching.times) - pages
        taken = time.monotonic() - began
    assert not watching.failures, watching.failures[:3]
    each = [(later - earlier) / taken for earlier, later in zip(before, after, strict=True)]
    return Asked(pages / taken, *each)


def counts(place: Place) -> tuple[int, int, int]:
    """Return the requests, commands and frames until now."""
    registry: Registry = place.app.rabbitdelay.registry
    (found,) = registry.store.commands(lambda pipe: pipe.info("commandstats"))
    commands = sum(
        each["calls"]
        for name, each in found.items()
        if name not in ("cmdstat_info", "cmdstat_ping")
    )
    frames = place.broker.ctl("list_connections", "recv_cnt", "--silent").split()
    return place.management.requests, commands, sum(map(int, frames))


def lateness(place: Place, seconds: float) -> list[float]:
    """Return how late tasks ran, in milliseconds, that were due one after the other."""
    redis, key = place.app.backend.client, uuid4().hex
    start, number = time.time() + 5, int(seconds * RATE)
    instants = [start + each / RATE for each in range(number)]
    rows = [
        Row(args=(each,), kwargs={"key": key}, eta=datetime.fromtimestamp(each, UTC))
        for each in instants
    ]
    place.app.rabbitdelay.send_many("note", rows, envelopes=False)
    wait_for(lambda: redis.llen(key) >= number, "the tasks", PATIENCE, 0.5)
    notes = [json.loads(each) for each in redis.lrange(key, 0, -1)]
    return [(each["at"] - each["given"][0]) * 1000 for each in notes]


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.web", description=__doc__)
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=180, help="for which many look")
    parser.add_argument("--late-seconds", type=float, default=60, help="of due tasks, each time")
    parser.add_argument("--only-pages", action="store_true", help="leave the viewers out")
    options = parser.parse_args()
    targets: list[Target] = []
    with a_place() as place:
        print(f"RabbitMQ {measure.version_of(place.broker)}, {options.tasks:,} tracked tasks")
        start = fill(place, options.tasks)
        first = next(place.app.rabbitdelay.pending(due_after=start))
        paths = addresses(start, options.tasks, first.task_id)
        with served(place) as (address, server):
            times = page_times(address, paths, options.rounds)
            print(f"\n{'':40} {'median':>8} {'highest':>8}  (ms)")
            for name, found in times.items():
                print(f"{name:40} {median(found):8.0f} {max(found):8.0f}")
            slowest = max(map(median, times.values()))
            targets.append(Target("the goal, as a multiple of the slowest", GOAL_MS / slowest, 1.0))
            if not options.only_pages:
                targets += viewing(place, server, address, paths, options)
    return int(not all(each["met"] for each in measure.judge(targets)))


def memory_of(process: int) -> float:
    """Return the mebibytes of memory that a process has."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (size,) = (each.split()[1] for each in lines if each.startswith("VmRSS:"))
    return int(size) / 1024


def viewing(
    place: Place, server: int, address: str, paths: dict[str, str], options: Any
) -> list[Target]:
    """Measure what viewers cost."""
    shown = [paths[name] for name in OPEN]
    few = min(options.seconds, FEW_SECONDS)
    rates = {number: asked(place, address, shown, number, few) for number in (0, 1)}
    before = memory_of(server)
    rates[options.viewers] = asked(place, address, shown, options.viewers, options.seconds)
    print(f"\nmemory of the page: {before:,.0f} MiB before, {memory_of(server):,.0f} MiB after")
    print(f"\na second, for {few:,.0f} s, many for {options.seconds:,.0f} s:")
    print("                             pages  management API  Redis  AMQP frames")
    for number, each in rates.items():
        print(
            f"{number:10} viewers {each.pages:20.1f} {each.management:15.2f} {each.redis:6.1f} "
            f"{each.broker:12.1f}"
        )
    late: dict[str, list[list[float]]] = {"no viewers": [], f"{options.viewers} viewers": []}
    with Worker(place.settings, None):
        lateness(place, 5)
        for _ in range(3):
            late["no viewers"].append(lateness(place, options.late_seconds))
            with Viewers(address, shown, options.viewers) as watching:
                late[f"{options.viewers} viewers"].append(lateness(place, options.late_seconds))
            assert not watching.failures, watching.failures[:3]
    print(f"\nlateness of {RATE} tasks a second (ms)")
    for who, rounds in late.items():
        for found in rounds:
            part = quantiles(found, n=100)[98]
            print(f"  {who:12} median {median(found):6.1f}, 99 % {part:6.1f}")
    one, many = rates[1], rates[options.viewers]
    return [
        Target(f"{what}, one viewer as a part of {options.viewers}", of(one) / of(many), 1 / AS_ONE)
        for what, of in _ASKED.items()
    ]


_ASKED: Final[dict[str, Callable[[Asked], float]]] = {
    "management API": lambda each: max(each.management, 0.01),
    "commands to Redis": lambda each: each.redis,
    "AMQP frames": lambda each: each.broker,
}

if __name__ == "__main__":
    sys.exit(main())
