"""Whether each instant of each schedule has become of what its schedule promises. Pure.

It counts the instants by itself, and knows nothing of how the package decides. All times are
milliseconds of the machine's monotonic clock; instants are those of the time of day.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from typing import Final, Literal, NamedTuple, TypeAlias

from celery_rabbitdelay.schedules.occurrence import Overlap
from tests.chaos.ledger import Start, Trouble

#: Troubles after which Redis no longer knows what was decided before.
EMPTY: Final = "Redis killed, and empty"
BACK: Final = "Redis back at an older snapshot"
FORGETFUL: Final = frozenset({EMPTY, BACK})

#: Milliseconds after a trouble in which instants may be left out because of it: a lease of a killed
#: worker ends after a minute, and what waits for Redis comes back within another half.
AFTER_MS: Final = 90_000.0

#: Milliseconds within which a chain goes on after a trouble, beside its interval and the trouble.
GOES_ON_MS: Final = 180_000.0

#: Milliseconds after an edit in which what was decided before it may begin to run.
DECIDED_BEFORE_MS: Final = 5_000.0

#: Milliseconds that a decision, a publish and the end of a run take at most, on a busy machine.
SLACK_MS: Final = 500.0

#: What a schedule promises of instants that come late: one for all, each, or those within seconds.
CatchUp: TypeAlias = Literal["last", "all"] | float

#: How many of each complaint are said in full.
SHOWN: Final = 5


@dataclass(frozen=True)
class Planned:
    """A schedule.

    Attributes:
        name: Its name.
        group: The group that its instants belong to.
        queue: The queue of its application.
        seconds: Its interval.
        catch_up: As it is put.
        overlap: As it is put.
        lasts: How many seconds each run takes.
        begin_ms: The first instant, in milliseconds since 1970-01-01 UTC.
        end_ms: No instant after that has to run.
        is_open: Whether the schedule goes on after that.
    """

    name: str
    group: str
    queue: str
    seconds: int
    catch_up: CatchUp
    overlap: Overlap
    lasts: float
    begin_ms: int
    end_ms: int
    is_open: bool

    @property
    def instants(self) -> range:
        """The instants that have to run, or to have a reason."""
        return range(self.begin_ms, self.end_ms + 1, self.seconds * 1000)

    def has(self, instant: int) -> bool:
        """Return whether it is due at an instant."""
        is_over = instant > self.end_ms and not self.is_open
        return instant >= self.begin_ms and not is_over and not self._off(instant)

    def _off(self, instant: int) -> int:
        return (instant - self.begin_ms) % (self.seconds * 1000)


class Edit(NamedTuple):
    """A put of a schedule.

    Attributes:
        name: Its name.
        revision: What its task is given from then on.
        returned_ms: When the call returned.
    """

    name: str
    revision: int
    returned_ms: float


@dataclass
class Found:
    """What was found.

    Attributes:
        ran: How many instants ran, by group.
        twice: How many runs there were beyond the first of an instant, by cause.
        left_out: How many instants did not run, by group and reason.
        decided_before: How many runs had arguments that an edit had replaced, by cause.
        longest_gap: By group, the longest time without a run beyond the interval, in seconds.
        complaints: What is wrong, in words.
    """

    ran: Counter[str] = field(default_factory=Counter)
    twice: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    decided_before: Counter[str] = field(default_factory=Counter)
    longest_gap: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    complaints: list[str] = field(default_factory=list)

    def complain(self, what: str, cases: Sequence[object]) -> None:
        """Note that something is wrong, if it is."""
        if cases:
            shown = "; ".join(map(str, cases[:SHOWN]))
            self.complaints.append(f"{len(cases)} {what}: {shown}")

    def lines(self) -> Iterator[str]:
        """Yield the figures in words."""
        for name in ("ran", "left_out", "twice", "decided_before", "longest_gap"):
            values = getattr(self, name).items()
            yield f"{name}: " + (", ".join(f"{key} {value:g}" for key, value in values) or "0")


@dataclass(frozen=True)
class Instants:
    """The instants of schedules, and their runs.

    Attributes:
        plans: The schedules.
        edits: Their puts.
        starts: Their runs.
        troubles: What was done meanwhile.
        shift_ms: What makes a time of the monotonic clock of a time of day.
        until_ms: Until when all schedules had to run; later starts are those of the last instants.
    """

    plans: Sequence[Planned]
    edits: Sequence[Edit]
    starts: Iterable[Start]
    troubles: Sequence[Trouble]
    shift_ms: float
    until_ms: float

    def missing(self) -> list[str]:
        """Return the instants that have to run and have not, as their tasks' ids begin."""
        return [
            f"{plan.name}:{instant:015d}"
            for plan in self.plans
            if plan.catch_up == "all"
            for instant in plan.instants
            if instant not in self.runs[plan.name]
            and not self._edited_after_loss(plan, instant + self.shift_ms)
        ]

    def _edited_after_loss(self, plan: Planned, at_ms: float) -> bool:
        """Return whether an edit has replaced what was due before, and Redis did not know that."""
        return any(
            each.begin_ms - AFTER_MS <= at_ms <= edited_ms
            and each.begin_ms <= edited_ms <= each.end_ms + AFTER_MS
            for each in self.troubles
            if each.what == EMPTY
            for edited_ms in self._edited[plan.name]
        )

    @cached_property
    def _edited(self) -> dict[str, list[float]]:
        """When the first put of each revision of each schedule has returned, but for the first."""
        found: dict[str, list[float]] = {each.name: [] for each in self.plans}
        known: set[tuple[str, int]] = set()
        for edit in self.edits:
            if edit.revision and edit[:2] not in known:
                known.add(edit[:2])
                found[edit.name].append(edit.returned_ms)
        return found

    @cached_property
    def runs(self) -> dict[str, dict[int, list[Start]]]:
        """The runs of each instant of each schedule, in the order in which they began."""
        found: dict[str, dict[int, list[Start]]] = {each.name: {} for each in self.plans}
        for start in sorted(self.starts, key=lambda each: each.at_ms):
            name, instant, _ = start.id.rsplit(":", 2)
            found[name].setdefault(int(instant), []).append(start)
        return found

    def judge(self) -> Found:
        """Return what was found."""
        found = Found()
        for plan in self.plans:
            runs = self.runs[plan.name]
            found.ran[plan.group] += sum(len(runs[each]) > 0 for each in runs)
            found.complain(
                f"instants of {plan.name} were never due",
                [each for each in runs if not plan.has(each)],
            )
            self._judge_gaps(plan, found)
        found.complain("instants did not run", self.missing())
        self._judge_left_out(found)
        self._judge_twice(found)
        self._judge_places(found)
        self._judge_arguments(found)
        self._judge_overlaps(found)
        return found

    def _judge_left_out(self, found: Found) -> None:
        """Complain of instants that did not run and may be left out, without a reason."""
        without: list[str] = []
        for plan in self.plans:
            last_ms = 0.0
            for instant in plan.instants:
                if starts := self.runs[plan.name].get(instant):
                    last_ms = max(last_ms, starts[-1].at_ms)
                    continue
                if plan.catch_up == "all":
                    is_excused = self._edited_after_loss(plan, instant + self.shift_ms)
                    found.left_out["all (edited after Redis had lost it)"] += is_excused
                    continue
                reason = self._reason(plan, instant + self.shift_ms, last_ms)
                found.left_out[f"{plan.group} ({reason})"] += 1
                if not reason:
                    without.append(f"{plan.name}:{instant:015d}")
        found.complain("instants were left out without a reason", without)

    def _reason(self, plan: Planned, at_ms: float, last_ms: float) -> str:
        """Return why an instant was left out; empty for no reason."""
        if plan.catch_up == "last" and last_ms >= at_ms - plan.lasts * 1000 - SLACK_MS:
            return "the one before was late, or still ran"
        # A backlog leaves out what is not too late only if Redis forgets, or a lease goes on.
        is_plain_last = plan.catch_up == "last" and plan.overlap == "allow"
        late_ms = 0.0 if plan.catch_up == "last" else float(plan.catch_up) * 1000
        around = [
            (at_ms > each.end_ms, each.begin_ms - each.end_ms, each.what)
            for each in self.troubles
            if (each.what in FORGETFUL or not is_plain_last)
            and each.begin_ms - late_ms - SLACK_MS <= at_ms <= each.end_ms + AFTER_MS
        ]
        return min(around)[-1] if around else ""  # the longest of those that it is in

    def _judge_twice(self, found: Found) -> None:
        """Complain of runs beyond the first that neither a killed worker nor Redis explains."""
        without: list[str] = []
        for runs in self.runs.values():
            for starts in runs.values():
                for first, again in pairwise(starts):
                    cause = "the worker was killed, or its connection" if again.redelivered else ""
                    cause = cause or self._forgot(first.at_ms, again.at_ms)
                    found.twice[cause or "no cause"] += 1
                    if not cause:
                        without.append(f"{again.id} after {again.at_ms - first.at_ms:.0f} ms")
        found.complain("ran twice without a cause", without)

    def _forgot(self, begin_ms: float, end_ms: float) -> str:
        """Return what made Redis forget between two instants; empty if nothing did."""
        for each in self.troubles:
            # What was decided since may be passed again by the backlog of before.
            until_ms = each.end_ms + AFTER_MS
            if each.what in FORGETFUL and begin_ms <= until_ms and end_ms >= each.begin_ms:
                return each.what
        return ""

    def _judge_places(self, found: Found) -> None:
        wrong: list[str] = []
        for plan in self.plans:
            for starts in self.runs[plan.name].values():
                for each in starts:
                    if {each.place, each.taken_from, each.args[0]} != {plan.queue}:
                        wrong.append(f"{each.id} in {each.place}, by {each.taken_from}")
        found.complain("runs in the queue of another application", wrong)

    def _judge_arguments(self, found: Found) -> None:
        """Complain of runs with arguments that an edit had replaced before they were decided."""
        replaced = {(each.name, each.revision - 1): each.returned_ms for each in self.edits[::-1]}
        wrong: list[str] = []
        for name, runs in self.runs.items():
            for start in (each for starts in runs.values() for each in starts):
                since_ms = start.at_ms - replaced.get((name, start.args[1]), start.at_ms)
                if since_ms <= 0:
                    continue
                cause = "before" if since_ms <= DECIDED_BEFORE_MS else ""
                cause = cause or self._forgot(start.at_ms - since_ms, start.at_ms)
                found.decided_before[cause or "no cause"] += 1
                if not cause:
                    wrong.append(f"{start.id}, {since_ms / 1000:.1f} s after the edit")
        found.complain("runs had arguments that were replaced before", wrong)

    def _judge_overlaps(self, found: Found) -> None:
        """Complain of runs that began while another one of their schedule went on."""
        wrong: list[str] = []
        for plan in self.plans:
            if plan.overlap == "allow":
                continue
            starts = sorted(chain(*self.runs[plan.name].values()), key=lambda each: each.at_ms)
            for first, then in pairwise(starts):
                end_ms = first.at_ms + plan.lasts * 1000
                if then.at_ms < end_ms and then.id != first.id and not self._redis_at(then.at_ms):
                    wrong.append(f"{then.id}, {end_ms - then.at_ms:.0f} ms too early")
        found.complain("runs overlapped", wrong)

    def _redis_at(self, at_ms: float) -> bool:
        """Return whether Redis was in trouble, as a lease knows it, up to a time."""
        return any(
            "Redis" in each.what and each.begin_ms <= at_ms <= each.end_ms + AFTER_MS
            for each in self.troubles
        )

    def _judge_gaps(self, plan: Planned, found: Found) -> None:
        """Complain if a chain did not go on in time after the troubles."""
        at = sorted(each.at_ms for starts in self.runs[plan.name].values() for each in starts)
        last_ms = min(plan.instants[-1] + self.shift_ms, self.until_ms)
        points = [plan.begin_ms + self.shift_ms, *at, last_ms]
        for begin_ms, end_ms in pairwise(points):
            gap_ms = end_ms - begin_ms - plan.seconds * 1000
            found.longest_gap[plan.group] = max(found.longest_gap[plan.group], gap_ms / 1000)
            spans = ((each.begin_ms, each.end_ms) for each in self.troubles)
            within = (min(end, end_ms) - max(begin, begin_ms) for begin, end in spans)
            if gap_ms - sum(each for each in within if each > 0) > GOES_ON_MS:
                found.complain(f"gaps in the chain of {plan.name}", [f"{gap_ms / 1000:.0f} s"])
