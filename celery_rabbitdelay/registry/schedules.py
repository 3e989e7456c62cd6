"""The records of the schedules under one prefix: what each sends, and when it is due next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Self, cast

from celery_rabbitdelay.levels.schedule import Occurrence
from celery_rabbitdelay.registry.connection import Store
from celery_rabbitdelay.registry.index import Names

#: The fields of a record. The occurrence has a field for each revision, so that an occurrence of a
#: former one, which is noted at the same time, takes no other's place.
_DEFINITION, _REVISION, _OCCURRENCE = "definition", "revision", "occurrence:"
_PAUSED, _HEALED, _LAST, _UNSENT = "paused", "healed", "last", "unsent"

#: For how many milliseconds one worker looks after the schedules, before another one may.
HEALING_MS: Final = 30_000


#: What becomes of an occurrence: it runs; it was cancelled; it is too late; its schedule is paused;
#: another run still goes.
Fate = Literal["ran", "cancelled", "late", "paused", "overlapped"]


class Came(NamedTuple):
    """What became of an occurrence.

    Attributes:
        due_ms: When it was due, in milliseconds since 1970-01-01 UTC.
        came_ms: When it came.
        fate: What became of it.
    """

    due_ms: int
    came_ms: int
    fate: Fate

    @classmethod
    def of(cls, text: str | None) -> Self | None:
        """Read it; None if there is none, or it cannot be read."""
        try:
            due, came, fate = (text or "").split()
            return cls(int(due), int(came), cast("Fate", fate))
        except ValueError:
            return None


class NotedSchedule(NamedTuple):
    """The record of a schedule.

    Attributes:
        definition: The task that it sends; see :func:`.definition_of`. Empty if Redis has lost it.
        occurrence: Its next occurrence, which waits in the levels.
        is_paused: Whether occurrences do not run.
        healed_ms: When its next occurrence was sent again last, because it had not come; 0: never.
        last: The last occurrence that has come; None if none is known.
        is_sent: Whether whoever has put it knows that its first occurrence was sent.
    """

    definition: str
    occurrence: Occurrence
    is_paused: bool = False
    healed_ms: int = 0
    last: Came | None = None
    is_sent: bool = True

    @classmethod
    def of(cls, found: Mapping[str, str]) -> Self | None:
        """Read it; None if there is no such schedule, or it cannot be read."""
        occurrence = Occurrence.of(found.get(f"{_OCCURRENCE}{found.get(_REVISION)}"))
        if occurrence is None:
            return None
        healed = found.get(_HEALED, "")
        return cls(
            found.get(_DEFINITION, ""),
            occurrence,
            bool(found.get(_PAUSED)),
            int(healed) if healed.isdigit() else 0,
            Came.of(found.get(_LAST)),
            not found.get(_UNSENT),
        )


#: No occurrence has come.
NOTHING_CAME: Final[Mapping[Occurrence, Came]] = MappingProxyType({})


class Schedules:
    """The schedules under one prefix.

    All methods raise :class:`.RegistryUnavailable` if Redis does not answer in time, or refuses.

    Args:
        store: Where they are kept.
        names: The names of all keys.
    """

    def __init__(self, store: Store, names: Names) -> None:
        self._store = store
        self._names = names

    def get(self, names: Sequence[str]) -> list[NotedSchedule | None]:
        """Return what is noted about schedules, None for each of which nothing is."""

        def add(pipeline: Any) -> None:
            for name in names:
                pipeline.hgetall(self._names.of("schedule", name))

        return [NotedSchedule.of(found) for found in (self._store.commands(add) if names else ())]

    def all(self) -> list[str]:
        """Return the names of all schedules."""
        (names,) = self._store.commands(
            lambda pipe: pipe.zrange(self._names.only("schedules"), 0, -1)
        )
        return sorted(names)

    def overdue(self, until_ms: int) -> list[str]:
        """Return the names of the schedules whose next occurrence was due by then."""
        key = self._names.only("schedules")
        (names,) = self._store.commands(lambda pipe: pipe.zrangebyscore(key, "-inf", until_ms))
        return list(names)

    def overdue_for(self, now_ms: int) -> int:
        """Return for how many milliseconds an occurrence has not come, of that which is due first.

        0 if none is due.
        """
        key = self._names.only("schedules")
        (first,) = self._store.commands(lambda pipe: pipe.zrange(key, 0, 0, withscores=True))
        return max(now_ms - int(first[0][1]), 0) if first else 0

    def put(self, noted: NotedSchedule) -> None:
        """Note a schedule and its next occurrence."""
        record = self._names.of("schedule", noted.occurrence.name)
        fields = {
            _DEFINITION: noted.definition,
            _REVISION: noted.occurrence.revision,
            _PAUSED: "1" if noted.is_paused else "",
            _UNSENT: "" if noted.is_sent else "1",
        }

        def write(client: Any) -> None:
            client.delete(record)
            client.hset(record, mapping=fields)
            self._write(client, noted.occurrence)

        self._store.write((record, write), self._listed(noted.occurrence))

    def follow(
        self, following: Sequence[Occurrence], came: Mapping[Occurrence, Came] = NOTHING_CAME
    ) -> None:
        """Note occurrences that wait now, and what became of those that have come.

        Also if Redis has lost all; but not if others were put under their names meanwhile.
        """
        names = [*dict.fromkeys(each.name for each in (*following, *came))]
        noted = dict(zip(names, self.get(names), strict=True))

        def is_current(occurrence: Occurrence) -> bool:
            found = noted[occurrence.name]
            return found is None or found.occurrence.revision == occurrence.revision

        def add(pipeline: Any) -> None:
            for each in filter(is_current, following):
                record = self._names.of("schedule", each.name)
                pipeline.hsetnx(record, _REVISION, each.revision)
                self._write(pipeline, each)
                self._listed(each)[1](pipeline)
            for each, fate in came.items():
                if is_current(each) and (noted[each.name] or each.name in followed):
                    last = " ".join(map(str, fate))
                    pipeline.hset(self._names.of("schedule", each.name), _LAST, last)

        followed = {each.name for each in following}
        if names:
            self._store.commands(add)

    def _write(self, client: Any, occurrence: Occurrence) -> None:
        record = self._names.of("schedule", occurrence.name)
        client.hset(record, f"{_OCCURRENCE}{occurrence.revision}", occurrence.text)
        client.hdel(record, _HEALED)

    def _listed(self, occurrence: Occurrence) -> tuple[str, Callable[[Any], object]]:
        """Return the key of the names of all schedules, and what adds one that is due next."""
        key = self._names.only("schedules")
        return key, lambda client: client.zadd(key, {occurrence.name: occurrence.due_ms})

    def sent(self, name: str) -> None:
        """Note that the first occurrence of a schedule was sent."""
        record = self._names.of("schedule", name)
        self._store.commands(lambda pipe: pipe.hdel(record, _UNSENT))

    def heal(self, name: str, now_ms: int) -> None:
        """Note that the next occurrence of a schedule is sent again."""
        record = self._names.of("schedule", name)
        self._store.commands(lambda pipe: pipe.hset(record, _HEALED, now_ms))

    def pause(self, name: str, *, is_paused: bool) -> None:
        """Note whether occurrences of a schedule run."""
        record, value = self._names.of("schedule", name), "1" if is_paused else ""
        self._store.write((record, lambda client: client.hset(record, _PAUSED, value)))

    def end(self, occurrence: Occurrence) -> None:
        """Forget a schedule whose last occurrence has come, unless another one was put."""
        (noted,) = self.get([occurrence.name])
        if noted is not None and noted.occurrence.revision == occurrence.revision:
            changes = self._forgetting(occurrence.name)
            self._store.commands(lambda pipe: [run(pipe) for _, run in changes])

    def delete(self, name: str) -> None:
        """Forget a schedule."""
        self._store.write(*self._forgetting(name))

    def _forgetting(self, name: str) -> tuple[tuple[str, Callable[[Any], object]], ...]:
        key, record = self._names.only("schedules"), self._names.of("schedule", name)
        return (
            (key, lambda client: client.zrem(key, name)),
            (record, lambda client: client.delete(record)),
        )

    def taken_over(self, application: str) -> dict[str, str]:
        """Return which entries of beat an application has: "current", and when others ended."""
        key = self._names.only(f"beat:{application}")
        (found,) = self._store.commands(lambda pipe: pipe.hgetall(key))
        return dict(found)

    def take_over(self, application: str, former: str | None, current: str, now_ms: int) -> None:
        """Note which entries of beat an application has from now on; see :meth:`taken_over`."""
        key = self._names.only(f"beat:{application}")

        def add(pipeline: Any) -> None:
            pipeline.hset(key, "current", current)
            pipeline.hdel(key, current)
            if former is not None:
                pipeline.hset(key, former, now_ms)

        self._store.commands(add)

    def may_heal(self) -> bool:
        """Return whether the caller is the one that looks after the schedules now."""
        key = self._names.only("healing")
        (is_first,) = self._store.commands(lambda pipe: pipe.set(key, "1", nx=True, px=HEALING_MS))
        return bool(is_first)
