"""Whether each instant of each schedule has become of what its schedule promises. Pure.

It counts the instants by itself, and knows nothing of how the package decides. All times are
milliseconds of the machine's monotonic clock; instants are those of the time of day.
"""

from __future__ import annotations

from collections import defaultdict
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
        is_off = (instant - self.begin_ms) % (self.seconds * 1000)
        return instant >= self.begin_ms and not is_over and not is_off


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
        counts: By what and what of it: how many instants of a group ``ran``, were ``left_out`` for
            a reason, ran ``twice`` by a cause, or had arguments that an edit had replaced
            (``decided_before``); and of a group the ``longest_gap``: the longest time without a run
            beyond the interval, in seconds.
        complaints: What is wrong, in words.
    """

    counts: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    complaints: list[str] = field(default_factory=list)

    def complain(self, what: str, cases: Sequence[object]) -> None:
        """Note that something is wrong, if it is."""
        if cases:
            shown = "; ".join(map(str, cases[:5]))
            self.complaints.append(f"{len(cases)} {what}: {shown}")

    def lines(self) -> Iterator[str]:
        """Yield the figures in words."""
        for what in ("ran", "left_out", "twice", "decided_before", "longest_gap"):
            own = [f"{of} {value:g}" for (name, of), value in self.counts.items() if name == what]
            yield f"{what}: {', '.join(own) or 0}"


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

    @cached_property
    def runs(self) -> dict[str, dict[int, list[Start]]]:
        """The runs of each instant of each schedule, in the order in which they began."""
        found: dict[str, dict[int, list[Start]]] = {each.name: {} for each in self.plans}
        for start in sorted(self.starts, key=lambda each: each.at_ms):
            name, instant, _ = start.id.rsplit(":", 2)
            found[name].setdefault(int(instant), []).append(start)
        return found

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

    def judge(self) -> Found:
        """Return what was found."""
        found = Found()
        found.complain("instants did not run", self.missing())
        for plan in self.plans:
            runs = self.runs[plan.name]
            every = sorted(chain(*runs.values()), key=lambda each: each.at_ms)
            found.counts["ran", plan.group] += len(runs)
            found.complain(
                f"instants of {plan.name} were never due",
                [each for each in runs if not plan.has(each)],
            )
            self._judge_gaps(plan, [each.at_ms for each in every], found)
            self._judge_left_out(plan, found)
            self._judge_twice(runs.values(), found)
            self._judge_arguments(plan, every, found)
            found.complain(
                "runs in the queue of another application",
                [
                    f"{each.id} in {each.place}, by {each.taken_from}"
                    for each in every
                    if {each.place, each.taken_from, each.args[0]} != {plan.queue}
                ],
            )
            if plan.overlap != "allow":
                self._judge_overlaps(plan, every, found)
        return found

    def _edited_after_loss(self, plan: Planned, at_ms: float) -> bool:
        """Return whether an edit has replaced what was due before, and Redis did not know that."""
        return any(
            each.begin_ms - AFTER_MS <= at_ms <= edited_ms
            and each.begin_ms <= edited_ms <= each.end_ms + AFTER_MS
            for each in self.troubles
            if each.what == EMPTY
            for edited_ms in self._edited(plan)
        )

    def _edited(self, plan: Planned) -> list[float]:
        """Return when the first put of each revision has returned, but for the first revision."""
        returned: dict[int, float] = {}
        for edit in self.edits:
            if edit.name == plan.name and edit.revision:
                returned.setdefault(edit.revision, edit.returned_ms)
        return list(returned.values())

    def _judge_left_out(self, plan: Planned, found: Found) -> None:
        """Complain of instants that did not run and may be left out, without a reason."""
        without, last_ms = [], 0.0
        for instant in plan.instants:
            at_ms = instant + self.shift_ms
            if starts := self.runs[plan.name].get(instant):
                last_ms = max(last_ms, starts[-1].at_ms)
            elif plan.catch_up == "all":
                is_excused = self._edited_after_loss(plan, at_ms)
                found.counts["left_out", "all (edited after Redis had lost it)"] += is_excused
            else:
                reason = self._reason(plan, at_ms, last_ms)
                found.counts["left_out", f"{plan.group} ({reason})"] += 1
                without += [f"{plan.name}:{instant:015d}"] if not reason else []
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

    def _judge_twice(self, runs: Iterable[Sequence[Start]], found: Found) -> None:
        """Complain of runs beyond the first that neither a killed worker nor Redis explains."""
        without = []
        for first, again in chain.from_iterable(map(pairwise, runs)):
            cause = "the worker was killed, or its connection" if again.redelivered else ""
            cause = cause or self._forgot(first.at_ms, again.at_ms)
            found.counts["twice", cause or "no cause"] += 1
            without += [f"{again.id} after {again.at_ms - first.at_ms:.0f} ms"] if not cause else []
        found.complain("ran twice without a cause", without)

    def _forgot(self, begin_ms: float, end_ms: float) -> str:
        """Return what made Redis forget between two instants; empty if nothing did."""
        for each in self.troubles:
            # What was decided since may be passed again by the backlog of before.
            until_ms = each.end_ms + AFTER_MS
            if each.what in FORGETFUL and begin_ms <= until_ms and end_ms >= each.begin_ms:
                return each.what
        return ""

    def _judge_arguments(self, plan: Planned, starts: Sequence[Start], found: Found) -> None:
        """Complain of runs with arguments that an edit had replaced before they were decided."""
        own = [each for each in self.edits[::-1] if each.name == plan.name]
        replaced = {each.revision - 1: each.returned_ms for each in own}
        wrong = []
        for start in starts:
            since_ms = start.at_ms - replaced.get(start.args[1], start.at_ms)
            if since_ms > 0:
                cause = "before" if since_ms <= DECIDED_BEFORE_MS else ""
                cause = cause or self._forgot(start.at_ms - since_ms, start.at_ms)
                found.counts["decided_before", cause or "no cause"] += 1
                wrong += (
                    [f"{start.id}, {since_ms / 1000:.1f} s after the edit"] if not cause else []
                )
        found.complain("runs had arguments that were replaced before", wrong)

    def _judge_overlaps(self, plan: Planned, starts: Sequence[Start], found: Found) -> None:
        """Complain of runs that began while another one of their schedule went on."""
        wrong = []
        for first, then in pairwise(starts):
            # A lease goes on for as long after a trouble of Redis.
            in_trouble = any(
                "Redis" in each.what and each.begin_ms <= then.at_ms <= each.end_ms + AFTER_MS
                for each in self.troubles
            )
            early_ms = first.at_ms + plan.lasts * 1000 - then.at_ms
            if early_ms > 0 and then.id != first.id and not in_trouble:
                wrong.append(f"{then.id}, {early_ms:.0f} ms too early")
        found.complain("runs overlapped", wrong)

    def _judge_gaps(self, plan: Planned, at: Sequence[float], found: Found) -> None:
        """Complain if a chain did not go on in time after the troubles."""
        first_ms = plan.begin_ms + self.shift_ms
        last_ms = min(plan.instants[-1] + self.shift_ms, self.until_ms)
        for begin_ms, end_ms in pairwise([first_ms, *at, last_ms]):
            gap_ms = end_ms - begin_ms - plan.seconds * 1000
            longest = found.counts["longest_gap", plan.group]
            found.counts["longest_gap", plan.group] = max(longest, gap_ms / 1000)
            spans = ((each.begin_ms, each.end_ms) for each in self.troubles)
            within = (min(end, end_ms) - max(begin, begin_ms) for begin, end in spans)
            if gap_ms - sum(each for each in within if each > 0) > GOES_ON_MS:
                found.complain(f"gaps in the chain of {plan.name}", [f"{gap_ms / 1000:.0f} s"])
