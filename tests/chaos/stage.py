# ruff: noqa: T201  # a program at the terminal prints
"""The stage of a scenario: the cluster, the producers, the workers and the ledger."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from celery_rabbitdelay.kombu import Topology
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.testing import wait_for
from tests.chaos.application import PREFIX, Part, TaskQueue
from tests.chaos.cluster import Cluster, Node
from tests.chaos.ledger import Ledger, Trouble, Whereabouts
from tests.chaos.notes import NotesReader, now_ms
from tests.chaos.processes import ChaosProcess, Consumer, Producer, Worker
from tests.chaos.producing import Stream
from tests.chaos.whereabouts import look
from tests.set_up import SetUp

#: Seconds that a producer has to end after its stream, with every send's time limit.
TO_END: Final = 300.0

#: Seconds that nodes have to find each other again.
TO_JOIN: Final = 120.0

#: Seconds at the end in which a copy may still come.
COPIES: Final = 6.0

#: Seconds between two looks at the processes and the notes.
INTERVAL: Final = 0.2


class ProducerFailed(RuntimeError):
    """A producer's program has raised outside a send."""


class Stage(SetUp):
    """Where a scenario plays.

    Args:
        cluster: The brokers; started and stopped with the stage.
        queues: The queues of the application.
        settings: Further settings of Celery, for all processes.

    Attributes:
        topology: The topology under the application's prefix.
        complaints: What a scenario itself has found wrong, in words.
    """

    def __init__(
        self,
        cluster: Cluster,
        queues: Sequence[TaskQueue],
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.cluster = cluster
        self.queues = queues
        self.settings = dict(settings or {})
        self.topology = Topology(PREFIX)
        self.complaints: list[str] = []
        self._folder = Path(tempfile.mkdtemp(prefix="rabbitdelay-chaos-"))
        self._notes = NotesReader(self._folder)
        self._served: list[ChaosProcess] = []
        self._producers: list[Producer] = []
        self._troubles: list[Trouble] = []
        self._ended: Counter[str] = Counter()
        self._began = time.monotonic()

    def _set_up(self, stack: ExitStack) -> None:
        stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
        stack.enter_context(self.cluster)
        for node in self.cluster.nodes:
            node.while_waiting = self._look_after
        stack.callback(self._stop_processes)

    def say(self, what: str) -> None:
        """Print what happens, with the seconds since the beginning."""
        print(f"  {time.monotonic() - self._began:6.1f} s  {what}", flush=True)

    def part(self, first_node: int = 0) -> Part:
        """Return what a process has to know, with the node that it tries first."""
        url = self.cluster.url(first_node)
        ssl = self.cluster.ssl()
        settings = {**self.settings, **({"broker_use_ssl": ssl} if ssl else {})}
        return Part(url, self.queues, str(self._folder), settings)

    def worker(
        self,
        *queues: str,
        first_node: int = 0,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Worker:
        """Start a worker for queues and wait until it takes tasks; it is kept alive."""
        worker = Worker(self.part(first_node), queues, options, environment)
        self.serve(worker)
        return worker

    def consumer(self, queue: str) -> Consumer:
        """The same for a consumer of kombu."""
        consumer = Consumer(self.part(), queue)
        self.serve(consumer)
        return consumer

    def serve(self, process: ChaosProcess) -> None:
        """Start a process and wait until it does its work; it is kept alive."""
        self._stack.callback(process.stop)
        process.start()
        self._served.append(process)

    def kill(self, process: ChaosProcess) -> None:
        """Kill a worker without warning (SIGKILL) and start it again."""
        process.end(signal.SIGKILL)
        process.begin()

    def dismiss(self, process: ChaosProcess) -> None:
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
        producer = Producer(self.part(first_node), stream, environment)
        self._stack.callback(producer.stop)
        producer.begin()
        self._producers.append(producer)
        self.say(f"sending {stream.count} of group {stream.group}")
        if wait:
            self.wait_for_producers()
        return producer

    def wait_for_producers(self) -> None:
        """Wait until each producer has ended."""
        rest = max((each.stream.seconds for each in self._producers), default=0.0)
        self.wait(
            lambda: not any(each.running for each in self._producers), "producers", rest + TO_END
        )

    def wait(
        self, condition: Callable[[], object], what: str, timeout: float, interval: float = INTERVAL
    ) -> None:
        """Wait for a condition while processes that end are started again.

        Raises:
            TimeoutError: It was not true within ``timeout`` seconds.
        """

        def asked() -> object:
            self._look_after()
            return condition()

        wait_for(asked, what, timeout, interval)

    def wait_for_cluster(self) -> None:
        """Wait until each node sees all others; if they do not, say so and go on."""
        try:
            self.wait(self.cluster.is_together, "the whole cluster", TO_JOIN, interval=2.0)
        except TimeoutError as never:
            self.say(str(never))

    def pause(self, seconds: float) -> None:
        """Let things go on for a while."""
        with suppress(TimeoutError):
            self.wait(lambda: False, "a pause", seconds)

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

    def count(self, queue: str, node: Node | None = None) -> int:
        """Return how many messages are ready in one of the application's queues."""
        (entity,) = (each.entity() for each in self.queues if each.name == queue)
        with self.cluster.connection(node) as connection:
            counts = queue_counts(connection, [entity])[queue]
        return counts.messages if counts else 0

    def settle(self, patience: float) -> None:
        """Wait until everything that is confirmed has started, but no more seconds than these."""
        self.wait_for_producers()
        self.say(f"all sent; {self._notes.unfinished()} have not started")
        with suppress(TimeoutError):
            self.wait(lambda: not self._notes.unfinished(), "starts", patience)
        self.pause(COPIES)
        self.say(f"{self._notes.unfinished()} have not started")

    def ledger(self) -> Ledger:
        """Return everything that was noted up to now."""
        ledger = self._notes.ledger()
        ledger.troubles = self._troubles
        ledger.ended = dict(self._ended)
        return ledger

    def whereabouts(self) -> Whereabouts:
        """Return where messages are; the workers are ended for that."""
        for process in self._served:
            process.end()
        self._served.clear()
        nodes = [node for node in self.cluster.nodes if node.running]
        with self.cluster.connection() as connection:
            entities = [queue.entity() for queue in self.queues]
            return look(connection, nodes, self.topology, entities)

    def _look_after(self) -> None:
        for process in self._served:
            if not process.running:
                self._ended[f"{process.kind}: {process.last_words()}"] += 1
                self.say(f"a {process.kind} has ended: {process.last_words()}")
                process.begin()
        for producer in self._producers:
            if producer.failed:
                raise ProducerFailed(producer.log[-3000:])

    def _stop_processes(self) -> None:
        for process in (*self._served, *self._producers):
            process.stop()
