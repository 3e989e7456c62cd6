"""Grouping: nothing is early, nothing late, lost or doubled; the clock is a fake.

No real clock could be made to stand where an example wants it.
"""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_rabbitdelay.app import rows
from celery_rabbitdelay.app.rows import Group, Grouper
from celery_rabbitdelay.app.seams import Call
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import NEGLIGIBLE_DIVISOR, Due
from celery_rabbitdelay.levels.layout import Layout, clock
from tests.kernel.unit.clock import Clock
from tests.kernel.unit.strategies import layouts

MS = 1_000_000
START_NS = 1_900_000_000_000_400_000
CLOCK = Clock()


def due(clock: Clock, delay_ms: int, tolerance_ms: int = 0, *, is_instant: bool = False) -> Due:
    """Due so long from now, as :meth:`Due.after` and :meth:`Due.at` would say."""
    return Due(clock.now_ns + delay_ms * MS, delay_ms, is_instant, tolerance_ms)


@pytest.fixture(autouse=True)
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wall_clock, "ns", CLOCK.time_ns)


def started() -> Clock:
    CLOCK.now_ns = START_NS
    return CLOCK


class Grouped:
    """A grouper with its fake clock, and when each of its groups came out."""

    def __init__(self, layout: Layout) -> None:
        self.clock = started()
        self.grouper = Grouper(layout, lambda call: bytes(call.args))
        self.out: list[tuple[int, Group]] = []
        self.dues: dict[int, Due] = {}
        self.added: dict[int, int] = {}

    def add(
        self, delay_ms: int, tolerance_ms: int = 0, item: bytes = b"x", *, is_instant: bool = False
    ) -> list[Group]:
        """Add a message that is due so long from now; return the groups that come out."""
        row, own = len(self.dues), due(self.clock, delay_ms, tolerance_ms, is_instant=is_instant)
        self.dues[row], self.added[row] = own, self.clock.now_ns
        return self._noted(self.grouper.add(row, Call("", item, {}, own)))

    def flush(self) -> list[Group]:
        return self._noted(self.grouper.flush())

    def _noted(self, groups: Iterable[Group]) -> list[Group]:
        found = list(groups)
        self.out += [(self.clock.now_ns, group) for group in found]
        return found

    def rows(self) -> list[int]:
        """The messages that have come out."""
        return sorted(row for _, group in self.out for row in group.rows)


steps = st.tuples(
    st.integers(0, 3_000) | st.integers(0, 200_000_000),  # microseconds since the last one
    st.integers(-5_000, 100_000) | st.integers(1, 4_000 * 86_400_000),
    st.just(0) | st.integers(0, 5_000) | st.integers(0, 90_000_000),
    st.booleans(),
)


@given(layouts | st.just(clock()), st.lists(steps, max_size=40))
def test_none_is_early_or_late_and_each_comes_once(layout: Layout, given_steps: Any) -> None:
    it = Grouped(layout)
    for passed_us, delay_ms, tolerance_ms, is_instant in given_steps:
        it.clock.now_ns += passed_us * 1000 + 7
        delay_ms = min(delay_ms, layout.capacity_ms)
        it.add(delay_ms, tolerance_ms, is_instant=is_instant)
    it.flush()
    assert it.rows() == list(range(len(given_steps)))
    for out_ns, group in it.out:
        assert group.items == b"x" * len(group.rows)
        # Where the delay is written as it was, next to nothing of it was lost.
        ends_ns = out_ns + _left_ms(group.due, out_ns) * MS
        for row in group.rows:
            own = it.dues[row]
            assert ends_ns >= group.due.at_ns >= own.at_ns
            latest_ns = max(own.at_ns, it.added[row]) + (own.tolerance_ms + layout.tick_ms) * MS
            assert group.due.at_ns < latest_ns + MS
            assert ends_ns < latest_ns + 2 * MS + group.due.delay_ms * MS // NEGLIGIBLE_DIVISOR


def _left_ms(due: Due, now_ns: int) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wall_clock, "ns", lambda: now_ns)
        return due.remaining_ms()


@given(st.lists(st.tuples(st.integers(0, 3_000), st.integers(1, 10**9), st.booleans())))
def test_none_waits_for_others_longer_than_it_may(given_steps: list[tuple[int, int, bool]]) -> None:
    """It comes out at the latest with the first message that is added after its time."""
    it = Grouped(clock())
    limits: dict[int, int] = {}
    for row, (passed_ms, delay_ms, is_instant) in enumerate(given_steps):
        it.clock.now_ns += passed_ms * MS
        wait_ms = max(100, min(delay_ms // 10, 10_000)) if is_instant else 100
        limits[row] = it.clock.now_ns + wait_ms * MS
        it.add(delay_ms, is_instant=is_instant)
        late = {row for row, limit in limits.items() if limit <= it.clock.now_ns}
        assert late - {row} <= set(it.rows())


def test_those_of_a_tick_share_a_group_and_with_a_tolerance_the_roundest_tick_within_it() -> None:
    it = Grouped(clock())
    for delay_ms in (3_600_000, 3_599_950, 3_600_001, 5_000, 3_600_000):
        assert not it.add(delay_ms)
    groups = {tuple(group.rows): group.due for group in it.flush()}
    assert set(groups) == {(0, 1, 4), (2,), (3,)}
    assert (groups[0, 1, 4].at_ns, groups[0, 1, 4].delay_ms) == (START_NS + 3600 * 10**9, 3_600_000)
    it = Grouped(clock())
    for delay_ms in range(3_540_100, 3_600_000, 1_000):
        assert not it.add(delay_ms, 60_000)
    # The shortest delay with one stop would be 50, 51, ... seconds.
    for delay_ms in range(50_000, 60_000, 1_000):
        assert not it.add(delay_ms, 3_600_000)
    (group,) = it.flush()
    assert (group.due.delay_ms, len(group.rows)) == (3_600_000, 70)


def test_a_group_and_all_together_hold_so_many_messages_and_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = Grouped(clock())
    for number in range(1, 1501):
        assert bool(it.add(5_000)) == (number == 1000)
    assert [len(group.rows) for group in it.flush()] == [500]
    assert not it.add(5_000)
    groups = it.add(5_000, item=b"x" * 2**20)
    assert [list(group.rows) for group in groups] == [[1500], [1501]], "it shares with none"
    large = Grouped(clock())
    sizes = [len(group.items) for _ in range(50) for group in large.add(9, item=b"x" * 99_999)]
    assert sizes
    assert all(2**20 <= size < 2**20 + 99_999 for size in sizes)
    # Without those that have left.
    monkeypatch.setattr(rows, "MAX_TOTAL_BYTES", 10_000)
    it = Grouped(clock())
    most = flushes = 0
    for number in range(1, 300):
        flushes += bool(it.add(number * 100_000, item=b"x" * 36))
        most = max(most, len(it.dues) - len(it.rows()))
    assert (most, flushes) == (100, 2)


def test_a_message_that_cannot_be_written_leaves_the_others_alone() -> None:
    it = Grouped(clock())
    it.grouper = Grouper(clock(), lambda call: bytes(call.args or 1 / 0))  # type: ignore[arg-type]
    it.add(5_000, item=b"a")
    with pytest.raises(ZeroDivisionError):
        it.add(5_000, item=b"")
    it.add(5_000, item=b"b")
    (group,) = it.flush()
    assert (list(group.rows), bytes(group.items)) == ([0, 2], b"ab")
