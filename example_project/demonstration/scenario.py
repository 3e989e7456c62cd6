"""The run itself: send, kill the worker half-way, start it again, wait for the rest."""

import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from redis import Redis

from example_project.demonstration.gateway import MailGateway
from example_project.demonstration.journal import Dispatch, Journal
from example_project.demonstration.outcome import Kill, Outcome
from example_project.demonstration.processes import ChildProcess, spark_job, worker
from example_project.demonstration.progress import Progress
from example_project.demonstration.results import count_succeeded
from example_project.demonstration.run import Run
from example_project.demonstration.servers import count_in_levels, running_servers

#: Seconds that the Spark job may take, with the start of Java.
DISPATCH_TIMEOUT: Final = 300.0

#: Seconds without a new mail after which missing reminders count as lost. The longest pause of a
#: good run comes before the first reminder is due: 14 s.
PATIENCE: Final = 40.0

#: Seconds between two reads of the journal.
_INTERVAL: Final = 0.05


class DemonstrationFailed(Exception):
    """A process of the run has ended, or is stuck; the message shows the end of its log."""

    def __init__(self, process: ChildProcess, reason: str) -> None:
        super().__init__(f"The {process.name} {reason}. The end of its log:\n{process.log_tail()}")


def demonstrate(progress: Progress) -> Outcome:
    """Run the demonstration, from the start of the servers to their end; return the outcome.

    Args:
        progress: Shows the progress meanwhile.

    Raises:
        DemonstrationFailed: The worker or the Spark job failed.
        ServerNotStarted: RabbitMQ or Redis could not be started.
    """
    with tempfile.TemporaryDirectory(prefix="record-shop-") as folder:
        progress.phase("RabbitMQ and Redis start")
        gateway = MailGateway()
        with (
            gateway.served() as mail_gateway_url,
            running_servers(secrets.token_hex(3), mail_gateway_url) as run,
            worker(Path(folder), run.environment) as mailer,
            spark_job(Path(folder), run.environment) as dispatcher,
            run.connect_redis() as redis,
        ):
            outcome = Demonstration(run, redis, gateway, mailer, dispatcher, progress).watch()
            progress.phase("everything stops")
    return outcome


class Demonstration:
    """A run whose processes have been started.

    Args:
        run: The run.
        redis: A client of the run's Redis.
        gateway: The mail gateway.
        mailer: The worker.
        dispatcher: The Spark job.
        progress: Shows the progress.
    """

    def __init__(
        self,
        run: Run,
        redis: Redis,
        gateway: MailGateway,
        mailer: ChildProcess,
        dispatcher: ChildProcess,
        progress: Progress,
    ) -> None:
        self._run = run
        self._redis = redis
        self._mailer = mailer
        self._dispatcher = dispatcher
        self._progress = progress
        self._journal = Journal(redis, run.prefix)
        self._gateway = gateway

    def watch(self) -> Outcome:
        """Watch the run to its end, and kill the worker half-way."""
        self._progress.phase("the worker starts; Spark reads the orders and sends the reminders")
        dispatch = self._wait_for_dispatch()
        self._progress.phase(f"{dispatch.orders:,} reminders are sent; Spark has ended")
        self._wait_until(lambda: self._gateway.orders_mailed() >= dispatch.orders / 2)
        kill = self._kill_worker_and_start_another()
        self._progress.phase(f"worker killed, {kill.waiting:,} waiting; another one starts")
        self._wait_until(lambda: self._gateway.orders_mailed() >= dispatch.orders)
        self._mailer.stop()
        return Outcome(
            dispatch=dispatch,
            sent=self._journal.sent(),
            starts=self._journal.starts(),
            mails=self._gateway.mails(),
            refused=self._gateway.refused(),
            results=count_succeeded(self._redis, self._run.prefix),
            kill=kill,
        )

    def _wait_for_dispatch(self) -> Dispatch:
        deadline = time.monotonic() + DISPATCH_TIMEOUT
        while self._dispatcher.exit_code is None:
            if time.monotonic() > deadline:
                raise DemonstrationFailed(self._dispatcher, f"exceeds {DISPATCH_TIMEOUT:g} s")
            self._look()
        dispatch = self._journal.dispatch()
        if dispatch is None:
            reason = f"ended with exit code {self._dispatcher.exit_code}"
            raise DemonstrationFailed(self._dispatcher, reason)
        return dispatch

    def _kill_worker_and_start_another(self) -> Kill:
        killed_ms = time.time_ns() // 1_000_000
        self._mailer.kill()
        started = {start.order_id for start in self._journal.starts()}
        waiting = len(self._journal.sent().keys() - started)
        kill = Kill(killed_ms, waiting, in_levels=count_in_levels(self._run))
        self._mailer.start()
        return kill

    def _wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait until ``reached()``, or until no mail has gone out for too long."""
        mailed, since = -1, time.monotonic()
        while not reached():
            self._look()
            if self._gateway.orders_mailed() != mailed:
                mailed, since = self._gateway.orders_mailed(), time.monotonic()
            elif time.monotonic() - since > PATIENCE:
                return

    def _look(self) -> None:
        time.sleep(_INTERVAL)
        self._progress.counts(self._journal.sent_count(), self._gateway.orders_mailed())
        if self._mailer.exit_code is not None:
            raise DemonstrationFailed(
                self._mailer, f"ended with exit code {self._mailer.exit_code}"
            )
