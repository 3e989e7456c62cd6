# ruff: noqa: T201  # a program at the terminal prints
"""The stage of a scenario: the cluster, producers, workers and the ledger; and the verdict."""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, Final

from kombu import Connection, Queue

from celery_rabbitdelay.kombu import Topology
from celery_rabbitdelay.testing import RedisServer, wait_for
from tests.chaos.application import PREFIX, SOUND, Part, Stream, task_queue
from tests.chaos.checker import Verdict, judge, lines_of, missing
from tests.chaos.cluster import Cluster
from tests.chaos.ledger import Ledger, Notes, Trouble, now_ms
from tests.chaos.programs import Producer, Worker
from tests.chaos.whereabouts import look
from tests.set_up import SetUp

#: Seconds that a producer has to end, with every send's time limit.
TO_END: Final = 600.0


@contextmanager
def done(begin: str, end: str, things: Iterable[Any]) -> Iterator[None]:
    """Something is done to nodes, servers or programs, and undone: the names of methods."""
    for each in things:
        getattr(each, begin)()
    yield
    for each in things:
        getattr(each, end)()


killed = partial(done, "kill", "start")
frozen = partial(done, "suspend", "resume")


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
        ledger: What was noted until it was read last.
        workers: The workers, which are started again when they end.
        producers: The producers.
        verdict: The verdict, at the end; before, what a scenario itself finds wrong.
        keep: The folder of the notes, which stays; None for one that goes with the stage.
        looking: Who holds it changes the workers, or starts those that have ended.
        to_end: Seconds that producers have to end.
    """

    keep: Path | None = None

    def __init__(
        self,
        cluster: Cluster,
        *queues: Queue,
        limits: Mapping[str, float] | None = None,
        early: float = 0.0,
        patience: float = 600.0,
        **settings: Any,
    ) -> None:
        self.cluster, self.queues, self.settings = cluster, queues or (task_queue(SOUND),), settings
        self.ledger, self.verdict = Ledger(), Verdict()
        self.workers: list[Worker] = []
        self.producers: list[Producer] = []
        self._limits, self._early, self._patience = limits or {}, early, patience
        self.looking = RLock()
        self._version, self.to_end = "", TO_END
        self._began = time.monotonic()

    def _set_up(self, stack: ExitStack) -> None:
        prefix = "rabbitdelay-chaos-"
        self._folder = self.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix))
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        self.notes = Notes(str(self._folder))
        stack.enter_context(self.cluster)
        self._version = self.cluster.running.ctl("version").strip()
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
        """Start a Redis, which ends with the stage, and is the registry of what starts later."""
        redis = self._stack.enter_context(RedisServer())
        self.settings["rabbitdelay_registry_url"] = redis.url
        return redis

    def part(self, first_node: int = 0) -> Part:
        """Return what a process has to know, with the node that it tries first."""
        return Part(self.cluster.url(first_node), self.queues, str(self._folder), self.settings)

    def worker(
        self,
        queue: str,
        *options: str,
        first_node: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> Worker:
        """Start a worker for a queue and wait until it takes tasks; it is kept alive."""
        worker = Worker(self.part(first_node), queue, options, environment)
        self._stack.callback(worker.stop)
        worker.start()
        self.workers.append(worker)
        return worker

    def send(
        self,
        stream: Stream,
        *,
        first_node: int = 0,
        wait: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a producer for a stream; wait until it has sent all of it if ``wait``."""
        producer = Producer(self.part(first_node), stream, environment)
        self._stack.callback(producer.stop)
        producer.begin()
        self.producers.append(producer)
        self.to_end = max(self.to_end, stream.seconds + TO_END)
        self.say(f"sending {stream.count} of group {stream.group}")
        if wait:
            self._wait_for_producers()

    def _wait_for_producers(self) -> None:
        self.wait(
            lambda: not any(each.running for each in self.producers), "producers", self.to_end
        )

    def wait(
        self, condition: Callable[[], object], what: str, timeout: float, interval: float = 0.2
    ) -> None:
        """Wait for a condition while workers that end are started again.

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
            self.wait(lambda: seconds <= 0, "a pause", seconds)

    @contextmanager
    def trouble(self, what: str) -> Iterator[None]:
        """Note that there is trouble while the block runs, and until the cluster is together."""
        self.say(f"{what}: begins")
        begin_ms = now_ms()
        try:
            yield
            with suppress(TimeoutError):
                self.wait(self.cluster.is_together, "the whole cluster", 120, interval=2.0)
        finally:
            self.notes.write("trouble", Trouble(what, begin_ms, now_ms()))
            self.say(f"{what}: ends")

    def missing(self) -> list[str]:
        """Return what is confirmed and has not started up to now."""
        self.ledger.read(self._folder)
        return missing(self.ledger)

    def _conclude(self) -> None:
        self._wait_for_producers()
        self.say(f"all sent; {len(self.missing())} have not started")
        with suppress(TimeoutError):
            self.wait(lambda: not self.missing(), "starts", self._patience, interval=1.0)
        self.pause(6)  # for copies
        for worker in self.workers:
            worker.end()
        with Connection(self.cluster.running.url) as connection:
            for identity, queues in look(connection, Topology(PREFIX), self.queues).items():
                for queue in queues:
                    self.notes.write("place", {"id": identity, "queue": queue})
        # Last, because the workers have gone on until they were ended.
        self.say(f"{len(self.missing())} have not started")
        found, self.verdict = self.verdict, judge(self.ledger, self._limits, self._early)
        self.verdict.complaints += found.complaints

    def text(self) -> str:
        """Return the verdict in lines."""
        return "\n    ".join([f"RabbitMQ: {self._version}", *lines_of(self.verdict)])

    def _look_after(self) -> None:
        with self.looking:
            for worker in self.workers:
                if not worker.running:
                    self.say(f"a worker has ended: {worker.last_words()}")
                    worker.begin()
        for producer in self.producers:
            assert not producer.failed, producer.log[-3000:]
