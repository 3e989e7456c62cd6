"""The soak: tasks of all kinds on a cluster, while a seed draws all kinds of faults.

Three nodes, a Redis with a replica and sentinels, workers, producers that send tasks of every kind
(``kinds.py``), schedules, and faults in three lanes (``faults.py``). Nothing but the ledger says
what has to become of a task; ``checker.py`` judges it.
"""

import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, Final

from kombu.exceptions import OperationalError

from celery_rabbitdelay import RabbitDelayError
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.testing import RedisServer, wait_for
from tests.chaos.application import IS_FORMER, SOUND, make_app
from tests.chaos.cluster import Cluster
from tests.chaos.faults import FAULTS, READY, Planned, plan
from tests.chaos.kinds import FANNED, QUEUES, SCHEDULED, Mixed
from tests.chaos.ledger import Sent, Trouble, now_ms
from tests.chaos.network import NetworkedCluster
from tests.chaos.preloads import off_by
from tests.chaos.programs import Producer, Worker
from tests.chaos.spark_stream import Streamed
from tests.chaos.stage import Stage
from tests.former_version import REPOSITORY, extract
from tests.redis_servers import SentinelSetup

#: Without faults.
CALM: Final = "calm"

#: What docs/how-to/production.md says to set: in RabbitMQ, in Celery; and in Redis.
OF_ERLANG: Final = (
    "-rabbit dead_letter_worker_publisher_confirm_timeout 5000 "
    "-rabbit consumer_disconnected_timeout 10000 -kernel net_ticktime 6"
)
OF_CELERY: Final[dict[str, Any]] = {
    "broker_channel_error_retry": True,
    "broker_connection_max_retries": None,
    # For tasks without a delay, which take Celery's own path.
    "broker_transport_options": {"confirm_publish": True},
}
#: Written before the answer, so that a kill loses nothing.
OF_REDIS: Final = ("--appendonly", "yes", "--appendfsync", "no")

#: Of the whole time: the part in which tasks are sent, that of the longest delay, and that in which
#: there are faults. The longest delay of all, in seconds.
SENDING, LONGEST, FAULTY, MOST = 0.55, 0.3, 0.75, 2400.0

#: What each of five schedules promises.
PROMISES: Final[tuple[dict[str, Any], ...]] = (
    *({"catch_up": "all", "overlap": "allow"},) * 2,
    {"catch_up": 20.0, "overlap": "allow"},
    {"catch_up": "last", "overlap": "skip"},
    {"catch_up": "last", "overlap": "queue-one"},
)

#: Milliseconds by which the time of day may drift from the ledger's clock.
DRIFT_MS: Final = 100.0

#: Seconds until the first instants of schedules are due, when all of them are put.
HEAD_START: Final = 30.0


class Soak(Stage):
    """The stage of a soak.

    Attributes:
        redis_setup: The registry: a master, a replica, and sentinels.
        redis_options: What every Redis of it is started with.
        former: The variables of the environment of workers of the version before.
        asked: What was asked for, in words.
    """

    redis_options = OF_REDIS
    asked = ""

    def _set_up(self, stack: ExitStack) -> None:
        self._is_over, self._lanes = Event(), 0
        self._error: Exception | None = None
        for node in self.cluster.nodes:
            node.arguments = OF_ERLANG
            node.further = off_by(0)
        super()._set_up(stack)
        for node in self.cluster.nodes:
            node.while_waiting = lambda: None
        self.redis_setup = stack.enter_context(SentinelSetup(options=OF_REDIS))
        self.settings |= OF_CELERY | {
            "result_backend": stack.enter_context(RedisServer()).url,
            "rabbitdelay_registry_url": self.redis_setup.url,
            "rabbitdelay_registry_options": {
                "master_name": self.redis_setup.master_name,
                "socket_timeout": 5,
            },
        }
        folder = Path(stack.enter_context(TemporaryDirectory()))
        extract(folder, "celery_rabbitdelay")
        path = os.pathsep.join([str(folder), str(REPOSITORY)])
        self.former = {"PYTHONPATH": path, IS_FORMER: "1"}

    def text(self) -> str:
        """Return the verdict in lines, and how many tasks were to be sent in the time."""
        return f"{self.asked}\n    {super().text()}"

    def start_workers(self, number: int) -> None:
        """Start workers, together, and wait until they take tasks."""
        for each in range(number):
            own = (FANNED[0], f"{SCHEDULED},{FANNED[1]}")[each % 2]
            part = self.part(each % len(self.cluster.nodes))
            worker = Worker(part, f"{SOUND},{own}", (), None)
            self._stack.callback(worker.stop)
            worker.begin()
            self.workers.append(worker)
            if self.keep is not None:
                kept = self.keep / f"worker-{each}.log"
                self._stack.callback(partial(_copy, worker, kept))
        self.wait(lambda: all(READY in each.log for each in self.workers), "workers", 300)

    def send_all(self, what: Mixed | Streamed, first_node: int = 0) -> None:
        """Start a producer, which ends by itself."""
        producer = Producer(self.part(first_node), what)
        self._stack.callback(producer.stop)
        producer.begin()
        self.producers.append(producer)

    def put_schedules(self, number: int, seconds: float) -> None:
        """Put schedules, and note their instants."""
        begin_ms = int(time.time() + HEAD_START) * 1000
        end_ms, shift_ms = begin_ms + int(seconds * 1000), now_ms() - time.time() * 1000 - DRIFT_MS
        period = {"start": instant_of(begin_ms), "end": instant_of(end_ms)}
        app: Any = make_app(self.part())
        for each in range(number):
            name, every, promise = f"s{each}", 5 + each % 56, PROMISES[each % len(PROMISES)]
            group = f"schedule, {promise['catch_up']}"
            for instant in range(begin_ms, end_ms + 1, every * 1000):
                due_ms = instant + shift_ms
                sent = Sent(f"{name}:{instant:015d}", group, due_ms, due_ms, once=True)
                self.notes.begin(sent)
                if promise["catch_up"] == "all":
                    self.notes.end(sent.id)
            put = partial(app.rabbitdelay.schedules.put, name, "note", timedelta(seconds=every))
            self.wait(
                partial(_succeeds, partial(put, queue=SCHEDULED, **promise, **period)), "a put", 300
            )
        app.close()

    def make(self, planned: list[Planned]) -> None:
        """Make the faults of a timeline, those of each lane in a thread."""
        lanes = [
            Thread(target=self._make, args=(began, of_lane), daemon=True)
            for began in [time.monotonic()]
            for lane in {FAULTS[each.name].lane for each in planned}
            if (of_lane := [each for each in planned if FAULTS[each.name].lane == lane])
        ]
        for lane in lanes:
            lane.start()
        self._lanes = len(lanes)
        self.wait(lambda: self._lanes == 0 or self._error, "the faults", 3 * self.to_end)
        if self._error is not None:
            raise self._error

    def _make(self, began: float, planned: list[Planned]) -> None:
        """Make the faults of a lane, one after the other."""
        try:
            for each in planned:
                time.sleep(max(0.0, began + each.at - time.monotonic()))
                self._make_one(each)
        except Exception as error:  # noqa: BLE001  # it is raised where the scenario plays
            self._error = error
        self._lanes -= 1
        # Processes that a thread has started end with it.
        self._is_over.wait()

    def _make_one(self, planned: Planned) -> None:
        self.say(f"{planned.name}: begins")
        fault, begin_ms = FAULTS[planned.name], now_ms()
        with fault.make(self, random.Random(planned.target)):
            time.sleep(planned.seconds)
        if fault.lane == "brokers" and fault.copies:
            with suppress(TimeoutError):
                wait_for(self.cluster.is_together, "the whole cluster", 180, interval=2.0)
        forgets_ms = None if fault.forgets_ms is None else begin_ms - fault.forgets_ms
        explains = fault.copies, fault.registry, fault.early_ms, forgets_ms, fault.refuses
        self.notes.write("trouble", Trouble(planned.name, begin_ms, now_ms(), *explains))
        self.say(f"{planned.name}: ends")


def _copy(worker: Worker, to: Path) -> None:
    to.write_text(worker.log)


def _succeeds(call: Callable[[], object]) -> bool:
    try:
        call()
    except (RabbitDelayError, OperationalError):
        return False
    return True


def possible(networked: bool) -> list[str]:
    """Return the names of the faults that this machine can make."""
    return [name for name, each in FAULTS.items() if networked or each.needs != "network"]


def timeline(seed: int, seconds: float, case: str, networked: bool) -> list[Planned]:
    """Return the timeline of a seed; with a case, of this one fault, or of none."""
    names = {CALM: [], "": possible(networked)}.get(case, [case])
    return plan(seed, seconds * FAULTY, names)


def play_soak(play: Any) -> None:
    """All kinds of tasks, while all kinds of faults come, or one of them, or none (root)."""
    networked = os.geteuid() == 0 and shutil.which("ip") is not None and play.nodes > 1
    planned = timeline(play.seed, play.seconds, play.case, networked)
    print(f"seed {play.seed}:", *planned, sep="\n")  # noqa: T201
    cluster = (NetworkedCluster if networked else Cluster)(play.version, play.nodes)
    play.stage = stage = Soak(cluster, *QUEUES, patience=900.0)
    stage.asked = (
        f"seed {play.seed}, {play.tasks} tasks or as many as the producers can send in time"
    )
    stage.keep, stage.to_end = play.keep, 1200.0 + 2 * play.seconds
    longest = min(play.seconds * LONGEST, MOST)
    with stage:
        stage.start_workers(play.workers)
        stage.put_schedules(play.schedules, play.seconds * FAULTY)
        until_ms = now_ms() + play.seconds * SENDING * 1000
        pace = play.tasks / (play.seconds * SENDING) / play.producers
        for number in range(play.producers):
            mixed = Mixed(play.seed * 1000 + number, until_ms, pace, longest)
            stage.send_all(mixed, number % play.nodes)
        if play.spark:
            stage.send_all(Streamed(until_ms, play.spark))
        stage.make(planned)
