# ruff: noqa: T201  # a program at the terminal prints
"""The stage of a scenario: the cluster, producers, workers and the ledger; and the verdict."""

from __future__ import annotations

import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from celery_rabbitdelay.kombu import Topology
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.testing import RedisServer, wait_for
from tests.chaos.cluster import Cluster
from tests.chaos.ledger import Ledger, NotesReader, Trouble, now_ms
from tests.chaos.programs import PREFIX, Part, Producer, Stream, TaskQueue, Worker
from tests.chaos.verdict import Verdict, judge
from tests.chaos.whereabouts import look
from tests.set_up import SetUp

#: The queue of the tasks that have nothing to do with the trouble.
SOUND: Final = "sound"

#: Seconds that a producer has to end after its stream, with every send's time limit.
TO_END: Final = 300.0

#: The head of the table of verdicts.
HEADER: Final = (
    "| scenario | RabbitMQ | confirmed | raised (arrived) | lost | early | copies | late "
    "p50/p99/max s | not started, where |\n|---|---|---|---|---|---|---|---|---|"
)


class Stage(SetUp):
    """Where a scenario plays: a context whose end, without an error, waits and judges.

    Args:
        cluster: The brokers; started and stopped with the stage.
        *queues: The queues of the application; the first is its default.
        limits: By group, the seconds that no task may be late.
        early: Seconds that a task may be early.
        patience: Seconds at the end in which everything has to start.
        **settings: Further settings of Celery, for all processes.

    Attributes:
        topology: The topology under the application's prefix.
        complaints: What a scenario itself has found wrong, in words.
        verdict: The verdict, at the end.
    """

    def __init__(
        self,
        cluster: Cluster,
        *queues: TaskQueue,
        limits: Mapping[str, float] | None = None,
        early: float = 0.0,
        patience: float = 600.0,
        **settings: Any,
    ) -> None:
        self.cluster = cluster
        self.queues = queues or (TaskQueue(SOUND),)
        self.settings = settings
        self.topology = Topology(PREFIX)
        self.complaints: list[str] = []
        self.verdict = Verdict()
        self.version = ""
        self._limits, self._early, self._patience = limits or {}, early, patience
        self._served: list[Worker] = []
        self._producers: list[Producer] = []
        self._troubles: list[Trouble] = []
        self._ended: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._began = time.monotonic()

    def _set_up(self, stack: ExitStack) -> None:
        prefix = "rabbitdelay-chaos-"
        self.folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix))
        self._notes = NotesReader(Path(self.folder))
        stack.enter_context(self.cluster)
        self.version = self.cluster.running.ctl("version").strip()
        for node in self.cluster.nodes:
            node.while_waiting = self._look_after

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                self._conclude()
        finally:
            super().__exit__(*error)

    def say(self, what: str) -> None:
        """Print what happens, with the seconds since the beginning."""
        print(f"  {time.monotonic() - self._began:6.1f} s  {what}", flush=True)

    def redis(self) -> RedisServer:
        """Start a Redis, which ends with the stage."""
        return self._stack.enter_context(RedisServer())

    def part(self, queue: str = "", first_node: int = 0) -> Part:
        """Return what a process for a queue has to know, with the node that it tries first."""
        settings = {**self.settings, "broker_use_ssl": self.cluster.ssl()}
        return Part(self.cluster.url(first_node), self.queues, self.folder, settings, queue)

    def worker(
        self,
        queue: str,
        *options: str,
        first_node: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> Worker:
        """Start a worker for a queue and wait until it takes tasks; it is kept alive."""
        worker = Worker(self.part(queue, first_node), *options, environment=environment)
        self.serve(worker)
        return worker

    def serve(self, process: Worker) -> None:
        """Start a worker and wait until it takes tasks; it is kept alive."""
        self._stack.callback(process.stop)
        process.start()
        self._served.append(process)

    def kill(self, process: Worker) -> None:
        """Kill a worker without warning (SIGKILL) and start it again."""
        process.end(signal.SIGKILL)
        process.begin()

    def dismiss(self, process: Worker) -> None:
        """End a worker in order, and leave it so."""
        self._served.remove(process)
        process.end()

    def send(
        self,
        stream: Stream,
        *,
        first_node: int = 0,
        wait: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> Producer:
        """Start a producer for a stream; wait until it has sent all of it if ``wait``."""
        producer = Producer(self.part(first_node=first_node), stream, environment)
        self._stack.callback(producer.stop)
        producer.begin()
        self._producers.append(producer)
        self.say(f"sending {stream.count} of group {stream.group}")
        if wait:
            self._wait_for_producers()
        return producer

    def _wait_for_producers(self) -> None:
        rest = max((each.stream.seconds for each in self._producers), default=0.0)
        self.wait(
            lambda: not any(each.running for each in self._producers), "producers", rest + TO_END
        )

    def wait(
        self, condition: Callable[[], object], what: str, timeout: float, interval: float = 0.2
    ) -> None:
        """Wait for a condition while processes that end are started again.

        Raises:
            TimeoutError: It was not true within ``timeout`` seconds.
        """

        def asked() -> object:
            self._look_after()
            return condition()

        wait_for(asked, what, timeout, interval)

    def pause(self, seconds: float) -> None:
        """Let things go on for a while."""
        with suppress(TimeoutError):
            self.wait(lambda: False, "a pause", max(seconds, 0))

    def wait_for_cluster(self) -> None:
        """Wait until each node sees all others; if they do not, say so and go on."""
        try:
            self.wait(self.cluster.is_together, "the whole cluster", 120, interval=2.0)
        except TimeoutError as never:
            self.say(str(never))

    @contextmanager
    def trouble(self, what: str) -> Iterator[None]:
        """Note that there is trouble while the block runs."""
        self.say(f"{what}: begins")
        begin_ms = now_ms()
        try:
            yield
        finally:
            self._troubles.append(Trouble(what, begin_ms, now_ms()))
            self.say(f"{what}: ends")

    def count(self, queue: str) -> int:
        """Return how many messages are ready in one of the application's queues."""
        with self.cluster.connection() as connection:
            counts = queue_counts(connection, [self.part().queue(queue)])[queue]
        return counts.messages if counts else 0

    def ledger(self) -> Ledger:
        """Return everything that was noted up to now."""
        return self._notes.ledger(self._troubles)

    def settle(self) -> None:
        """Wait until everything that is confirmed has started, and for copies."""
        self._wait_for_producers()
        self.say(f"all sent; {self._notes.unfinished()} have not started")
        with suppress(TimeoutError):
            self.wait(lambda: not self._notes.unfinished(), "starts", self._patience)
        self.pause(6)
        self.say(f"{self._notes.unfinished()} have not started")

    def _conclude(self) -> None:
        self.settle()
        for process in self._served:
            process.end()
        self._served.clear()
        with self.cluster.connection() as connection:
            entities = [queue.entity() for queue in self.queues]
            places, self._reasons = look(connection, self.topology, entities)
        # Last, because the workers have gone on until they were ended.
        self.verdict = judge(self.ledger(), places, self._limits, self._early)
        self.verdict.complaints += self.complaints

    def row(self, title: str) -> str:
        """Return the row of the table."""
        verdict = self.verdict
        arrived = verdict.arrived_nevertheless
        early = f", by up to {max(verdict.early.values()):.1f} s" if verdict.early else ""
        cells = [
            title,
            self.version,
            str(verdict.sent["confirmed"]),
            listed({f"{name} ({arrived[name]})": n for name, n in verdict.errors.items()}),
            str(len(verdict.lost)),
            f"{len(verdict.early)}{early}",
            listed(verdict.copies),
            "; ".join(
                f"{group} ({late.tasks}) {late.p50:.2f}/{late.p99:.1f}/{late.max:.1f}"
                for group, late in verdict.late.items()
            ),
            listed(verdict.where),
        ]
        return f"| {' | '.join(cells)} |"

    def text(self, title: str) -> str:
        """Return all of it in lines."""
        lines = [
            self.row(title),
            f"cut off while they were sent: {self.verdict.sent['unknown']}",
            *(f"in undeliverable: {n}: {why}" for why, n in self._reasons.items()),
            *(f"ended by itself, {n} times: {what}" for what, n in self._ended.items()),
            *(f"NOT GOOD: {complaint}" for complaint in self.verdict.complaints),
        ]
        return "\n  ".join(lines)

    def _look_after(self) -> None:
        for process in self._served:
            if not process.running:
                self._ended[process.last_words()] += 1
                self.say(f"a worker has ended: {process.last_words()}")
                process.begin()
        for producer in self._producers:
            assert not producer.failed, producer.log[-3000:]


def listed(counts: Mapping[str, int]) -> str:
    """Return counts in words, the largest first."""
    return ", ".join(f"{n} {what}" for what, n in Counter(counts).most_common() if n) or "0"
