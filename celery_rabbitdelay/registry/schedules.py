"""The records of the schedules under one prefix: what each sends, and when it is due next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

from celery_rabbitdelay.levels.schedule import Occurrence
from celery_rabbitdelay.registry.connection import Store
from celery_rabbitdelay.registry.index import Names

_DEFINITION, _OCCURRENCE, _PAUSED, _HEALED = "definition", "occurrence", "paused", "healed"
_FIELDS: Final = (_DEFINITION, _OCCURRENCE, _PAUSED, _HEALED)

#: For how many milliseconds one worker looks after the schedules, before another one may.
HEALING_MS: Final = 30_000


class NotedSchedule(NamedTuple):
    """The record of a schedule.

    Attributes:
        definition: The task that it sends; see :func:`.definition_of`. Empty if Redis has lost it.
        occurrence: Its next occurrence, which waits in the levels.
        is_paused: Whether occurrences do not run.
        healed_ms: When its next occurrence was sent again last, because it had not come; 0: never.
    """

    definition: str
    occurrence: Occurrence
    is_paused: bool = False
    healed_ms: int = 0

    @classmethod
    def of(cls, found: Sequence[str | None]) -> Self | None:
        """Read it; None if there is no such schedule, or it cannot be read."""
        definition, text, paused, healed = found
        occurrence = Occurrence.of(text)
        if occurrence is None:
            return None
        healed = healed if healed is not None and healed.isdigit() else "0"
        return cls(definition or "", occurrence, bool(paused), int(healed))


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
                pipeline.hmget(self._names.schedule(name), *_FIELDS)

        return [NotedSchedule.of(found) for found in (self._store.commands(add) if names else ())]

    def all(self) -> list[str]:
        """Return the names of all schedules."""
        (names,) = self._store.commands(lambda pipe: pipe.zrange(self._names.schedules(), 0, -1))
        return sorted(names)

    def overdue(self, until_ms: int) -> list[str]:
        """Return the names of the schedules whose next occurrence was due by then."""
        key = self._names.schedules()
        (names,) = self._store.commands(lambda pipe: pipe.zrangebyscore(key, "-inf", until_ms))
        return list(names)

    def put(self, noted: NotedSchedule) -> None:
        """Note a schedule and its next occurrence."""
        paused = "1" if noted.is_paused else ""
        self._write(noted.occurrence, {_DEFINITION: noted.definition, _PAUSED: paused})

    def follow(self, occurrence: Occurrence) -> None:
        """Note the occurrence that follows one that has come; also if Redis has lost all.

        Not if another one was put under the name meanwhile.
        """
        if self._revision(occurrence.name) in (None, occurrence.revision):
            self._write(occurrence, {})

    def _write(self, occurrence: Occurrence, more: Mapping[str, str]) -> None:
        record = self._names.schedule(occurrence.name)

        def add(pipeline: Any) -> None:
            pipeline.zadd(self._names.schedules(), {occurrence.name: occurrence.instant_ms})
            pipeline.hset(record, mapping={_OCCURRENCE: occurrence.text, **more})
            pipeline.hdel(record, _HEALED)

        self._store.commands(add)

    def _revision(self, name: str) -> str | None:
        (noted,) = self.get([name])
        return None if noted is None else noted.occurrence.revision

    def heal(self, name: str, now_ms: int) -> None:
        """Note that the next occurrence of a schedule is sent again."""
        record = self._names.schedule(name)
        self._store.commands(lambda pipe: pipe.hset(record, _HEALED, now_ms))

    def pause(self, name: str, *, is_paused: bool) -> None:
        """Note whether occurrences of a schedule run."""
        record, value = self._names.schedule(name), "1" if is_paused else ""
        self._store.commands(lambda pipe: pipe.hset(record, _PAUSED, value))

    def end(self, occurrence: Occurrence) -> None:
        """Forget a schedule whose last occurrence has come, unless another one was put."""
        if self._revision(occurrence.name) == occurrence.revision:
            self.delete(occurrence.name)

    def delete(self, name: str) -> None:
        """Forget a schedule."""

        def add(pipeline: Any) -> None:
            pipeline.zrem(self._names.schedules(), name)
            pipeline.delete(self._names.schedule(name))

        self._store.commands(add)

    def taken_over(self, application: str) -> dict[str, str]:
        """Return which entries of beat an application has: "current", and when others ended."""
        key = self._names.beat(application)
        (found,) = self._store.commands(lambda pipe: pipe.hgetall(key))
        return dict(found)

    def take_over(self, application: str, former: str | None, current: str, now_ms: int) -> None:
        """Note which entries of beat an application has from now on; see :meth:`taken_over`."""
        key = self._names.beat(application)

        def add(pipeline: Any) -> None:
            pipeline.hset(key, "current", current)
            pipeline.hdel(key, current)
            if former is not None:
                pipeline.hset(key, former, now_ms)

        self._store.commands(add)

    def may_heal(self) -> bool:
        """Return whether the caller is the one that looks after the schedules now."""
        key = self._names.healing()
        (is_first,) = self._store.commands(lambda pipe: pipe.set(key, "1", nx=True, px=HEALING_MS))
        return bool(is_first)
