"""What the status computes from the depths of the queues, and how it shows them."""

from typing import Any

from celery_rabbitdelay.kombu import Topology, custom
from celery_rabbitdelay.operations import status
from celery_rabbitdelay.operations.workers import COMMAND, status_of_workers
from celery_rabbitdelay.publishing.declaration import Backlog
from celery_rabbitdelay.publishing.kombu_internals import Counts

LAYOUT = custom([("hours", 6, 3600), ("minutes", 60, 60)])


TOPOLOGY = Topology(layout=LAYOUT)


def backlog(waiting: dict[str, dict[int, int]], **others: int) -> Backlog:
    digits = {each.name: waiting.get(each.name, {}) for each in LAYOUT.levels}
    levels = {name: sum(counts.values()) for name, counts in digits.items()}
    return Backlog(levels, digits, {name: Counts(n, 0) for name, n in others.items()}, ())


def test_the_shortest_long_wait_counts() -> None:
    minute = 60_000
    for waiting, bound in (
        ({}, None),
        # Three hours, and at most 59 minutes behind them.
        ({"hours.x1": {3: 1, 5: 0}}, 239 * minute),
        ({"hours.x1": {3: 1, 1: 1}}, 119 * minute),
        ({"hours.x1": {1: 1}, "minutes.x1": {5: 9}}, 5 * minute),
    ):
        assert status.due_within(TOPOLOGY, backlog(waiting)) == bound
    found = backlog({"hours.x1": {1: 5, 3: 7}, "minutes.x1": {1: 3}})
    for within, count in ((minute - 1, 0), (minute, 3), (119 * minute, 8), (1440 * minute, 15)):
        assert status.due_at_least(TOPOLOGY, found, within) == count
    # What meditates is due after the loop and the levels at the latest.
    others = backlog({}, meditation=1, undeliverable=5)
    assert status.due_within(TOPOLOGY, others) == 2 * LAYOUT.capacity_ms


def look(taken_at: float, waiting: dict[str, dict[int, int]], **received: int) -> status.Status:
    workers = {name: {"tasks": {"received": n, "latest": 0.0}} for name, n in received.items()}
    return status.Status(taken_at, backlog(waiting), workers)


def test_rates_are_what_changed_between_two_looks_in_a_second() -> None:
    before = look(10.0, {"hours.x1": {1: 50}}, a=100, b=5, gone=9)
    after = look(12.0, {"hours.x1": {1: 40, 2: 0}, "minutes.x1": {7: 3}}, a=120, b=0, new=8)
    rates = status.rates_between(before, after)
    assert rates == {"hours.x1": -5.0, "minutes.x1": 1.5, "tasks": 10.0}
    lines = list(status.status_lines(TOPOLOGY, after, {}, with_digits=True))
    assert f"    {'hours.1':14} {40:10,}" in lines
    assert not any(line.strip().startswith("hours.2 ") for line in lines)


def test_a_module_that_no_worker_serves_is_named_only_if_messages_wait_for_it() -> None:
    found = backlog({}, distribution=3, undeliverable=2, **{"check-in": 0})
    lines = [*status.status_lines(TOPOLOGY, status.Status(0.0, found, {}), {})]
    assert f"  {'distribution':16} {3:10,} waiting, no consumers" in lines
    assert f"  {'check-in':16} {0:10,} waiting" in lines
    assert f"  {'undeliverable':16} {2:10,} waiting" in lines


def test_a_worker_without_the_package_is_named_in_words() -> None:
    class App:
        """Its workers answer as Celery's ``Mailbox.dispatch`` does, which reports errors so."""

        @property
        def control(self) -> Any:
            return self

        def broadcast(self, *_: object, **__: object) -> list[dict[str, object]]:
            return [{"plain": {"error": repr(KeyError(COMMAND))}}, {"bad": {"error": "OSError()"}}]

    app: Any = App()
    workers = status_of_workers(app, app, 1.0)
    lines = [*status.status_lines(TOPOLOGY, status.Status(0.0, backlog({}), workers), {})]
    assert lines[-1] == "plain: cannot answer: it runs without celery_rabbitdelay"
    assert lines[-2] == "bad: cannot answer: OSError()"
