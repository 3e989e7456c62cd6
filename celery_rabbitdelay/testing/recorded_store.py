"""What the registry notes while an application is recorded, in memory instead of Redis.

The registry itself is the real one. Of a task that arrives, is sent, cancelled or postponed,
:mod:`celery_rabbitdelay.registry.rule` decides, which the scripts in Redis are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Final

from celery_rabbitdelay.exceptions import NotRecorded
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.registry import rule
from celery_rabbitdelay.registry.connection import ScriptCall, Store

#: What stands between the hash tag of a key and the id of its task.
_RECORD: Final = "}:task:"


@dataclass
class _Noted:
    """What is noted about a task.

    Attributes:
        record: What the rule goes by.
        key: The key of the attempt that waits.
        listing: If it is tracked and waits: its ``name``, its ``job``, when it was ``sent``, and
            the ``message`` that is sent anew if it is postponed to an earlier time.
    """

    record: rule.Record = rule.EMPTY
    key: str = ""
    listing: Mapping[str, str] = field(default_factory=dict)

    def settle(self, record: rule.Record) -> None:
        """Take a new record; if nothing waits any more, it is not listed."""
        self.record = record
        if record.waits is None:
            self.key, self.listing = "", {}

    @property
    def score(self) -> int:
        """When it is due, in milliseconds since 1970-01-01 UTC."""
        return max(self.record.due, self.record.not_before or 0)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of its record in Redis that somebody reads; see ``shared.lua``."""
        record = self.record
        known: dict[str, Any] = {name: each or None for name, each in self.listing.items()}
        for name in ("cancelled", "not_before", "ran"):
            known[name] = getattr(record, name)
        if record.waits is not None:
            known |= {"waits": ".".join(record.waits), "due": record.due}
        if self.key:
            known |= {"key": self.key, "order": record.order}
        return {name: str(value) for name, value in known.items() if value is not None}


class RecordedStore(Store):
    """Runs the registry's scripts and commands in memory.

    Args:
        postponed: Called with the id of each task that is postponed, and its new due time.
    """

    def __init__(self, postponed: Callable[[str, int], None]) -> None:
        super().__init__(lambda: None, "recorded", ())
        self._postponed = postponed
        self._lock = RLock()
        self._values: dict[str, Any] = {}
        #: Until when each value is kept, in milliseconds since 1970-01-01 UTC; not if for ever.
        self._ends: dict[str, int] = {}

    def call_each(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Run scripts; return what each of them says."""
        with self._lock:
            return [self._answer(call) for call in calls]

    call_durably = call_each

    def commands(self, add: Callable[[Any], object]) -> list[Any]:
        """Run commands that read."""
        pipeline = _Pipeline(self)
        with self._lock:
            add(pipeline)
        return pipeline.answers

    def _answer(self, call: ScriptCall) -> Any:
        if call.script == "reserve":
            raise NotRecorded("a rate that several senders share")
        script = getattr(self, f"_{call.script}")
        answers = [
            script(call, key, *given) for key, given in zip(call.keys, call.arguments, strict=True)
        ]
        return answers[0] if call.script in ("job", "lease", "pause", "postpone") else answers

    def value(self, key: str, default: Any = None) -> Any:
        """Return what is kept under a key."""
        if self._ends.get(key, wall_clock.ms() + 1) <= wall_clock.ms():
            self.drop(key)
        return self._values.get(key, default)

    def drop(self, key: str) -> None:
        """Forget what is kept under a key."""
        self._values.pop(key, None)
        self._ends.pop(key, None)

    def put(self, key: str, value: Any, until_ms: float | None = None) -> None:
        """Keep a value, until then at least."""
        self._values[key] = value
        if until_ms is not None:
            self._ends[key] = max(int(until_ms), self._ends.get(key, 0))

    def listed(self, index: str) -> list[tuple[str, int]]:
        """Return the ids and the due times of the tasks in an index, in their order."""
        shard, is_index, of = index.partition("}:due")
        if not is_index:
            raise NotRecorded(f"what the registry keeps in {index}")
        found = [
            (noted.score, key.removeprefix(shard + _RECORD))
            for key in [*self._values]
            if key.startswith(shard + _RECORD)
            and (noted := self.value(key)) is not None
            and (listing := noted.listing)
            and of in ("", f":task:{listing['name']}", f":job:{listing['job']}")
        ]
        return [(task_id, score) for score, task_id in sorted(found)]

    # The scripts; each takes its call, one of the keys, and its arguments.

    def _ask(self, call: ScriptCall, key: str, kind: str) -> str:
        if kind == "key":
            order = int(self.value(key, "-1").partition(" ")[0])
            return str(max(wall_clock.ns() // 1000, order + 1))
        noted = self.value(key, _Noted())
        return "" if noted.record.ran is None else str(rule.next_life(noted.record))

    def _claim(self, call: ScriptCall, key: str, order: str, task_id: str, due: str) -> str:
        newest, before = self.value(key), ""
        lives_ms = max(int(due), wall_clock.ms()) + call.keep_ms
        if newest is not None:
            number, _, before = newest.partition(" ")
            if (int(order), task_id) < (int(number), before):
                self.put(key, newest, lives_ms)
                return "superseded" if task_id != before else "replaced"
        self.put(key, f"{order} {task_id}", lives_ms)
        return f"newest {before}"

    def _arrive(self, call: ScriptCall, key: str, *given: Any) -> str:
        copy, life, attempt, due, queue, mark, former, heir_of, *last = given
        has_options, put_back_ms, word, is_paused = last
        noted, now_ms = self.value(key) or _Noted(), wall_clock.ms()
        message_name, generation, arrival = mark.split(".")
        message = rule.Message(
            copy,
            int(life),
            attempt,
            int(due),
            once=bool(queue),
            name=message_name,
            generation=int(generation),
            former=tuple(filter(None, former.split("."))),
            redelivered=heir_of == int(generation),
            in_job=has_options,
            is_old=max(int(due), put_back_ms) + call.keep_ms < now_ms,
        )
        record, verdict = rule.arrive(noted.record, message, word, is_paused, arrival)
        if call.shared[0] and record != noted.record:
            noted.settle(record)
            self.put(key, noted, max(int(due), now_ms) + call.keep_ms)
        elif key in self._values and verdict in ("later", "paused"):
            self.put(key, noted, now_ms + call.keep_ms)
        return verdict

    def _register(self, call: ScriptCall, key: str, *given: str) -> str:
        copy, life, attempt, due, under, order, name, job, message = given
        noted = self.value(key) or _Noted()
        sent = rule.Message(copy, int(life), attempt, int(due), int(order) if under else 0)
        record, state = rule.register(noted.record, sent)
        self.put(key, noted, int(due) + call.keep_ms)
        if record == noted.record:
            return state
        sent_ms = str(wall_clock.ms())
        if noted.record.waits == record.waits:
            sent_ms = noted.listing.get("sent", sent_ms)
        listing = {"name": name, "job": job, "sent": sent_ms, "message": message}
        noted.record, noted.key, noted.listing = record, under, listing if name else {}
        return state

    def _unlist(self, call: ScriptCall, key: str, newer: int) -> None:
        noted = self.value(key)
        if noted is not None and noted.key and noted.record.order < newer:
            noted.listing = {}

    def _cancel(self, call: ScriptCall, key: str) -> str:
        (note_ms, also_future), noted = call.shared, self.value(key) or _Noted()
        last = max(noted.score, wall_clock.ms())
        waited, under = noted.record.waits is not None, noted.key
        record, found = rule.cancel(noted.record, also_future=bool(also_future))
        if found == "done" and under:
            found = f"done {noted.record.order} {under}"
        if record != noted.record:
            noted.settle(record)
            self.put(key, noted, last + (call.keep_ms if waited else int(note_ms)))
        return found

    def _postpone(
        self, call: ScriptCall, key: str, due: str, newest: str, of_key: str
    ) -> list[str]:
        noted = self.value(key) or _Noted()
        if noted.key != of_key and not noted.record.is_cancelled(noted.record.life):
            return ["key", noted.key]
        record, found = rule.postpone(
            noted.record, int(due), int(newest or 0), bool(call.shared[0])
        )
        listing = noted.listing
        if found == "earlier" and not listing:
            return [found, "", ""]
        if record != noted.record:
            noted.record = record
            self.put(key, noted, int(due) + call.keep_ms)
            self._postponed(key.partition(_RECORD)[2], int(due))
        return [found, listing["name"], listing["message"]] if found == "earlier" else [found]

    def _job(
        self, call: ScriptCall, key: str, verb: str, own: str, instant: int, margin_ms: int
    ) -> list[Any]:
        now_ms, job = wall_clock.ms(), self.value(key) or {}
        is_new = job.get("state") == "open" and now_ms >= job["expires"]
        if is_new:
            job |= {"state": "aborted", "expired": True}
        state = job.get("state", "")
        is_own = job.get("id") == own
        if verb == "open":
            if state and not (state == "open" and is_own):
                if state == "open" or now_ms < job["free"]:
                    return [state, job["id"], self._left(key), job["expires"]]
                job["former"] = {**job.get("former", {}), job["id"]: state}
                job.pop("expired", None)
                state = ""
            if not state:
                ends = now_ms + instant
                job |= {"state": "open", "id": own, "expires": ends, "free": ends + margin_ms}
            self.put(key, job, now_ms + instant + margin_ms + call.keep_ms)
            return ["opened", own, self._left(key), ""]
        if verb == "join" and state:
            job["free"] = max(job["free"], instant + margin_ms)
            self.put(key, job, instant + margin_ms + call.keep_ms)
        elif verb in ("commit", "abort") and state == "open":
            state = job["state"] = "committed" if verb == "commit" else "aborted"
        elif verb == "look" and own and not is_own:
            return [job.get("former", {}).get(own, ""), "", 0, ""]
        words = ["expired"] * job.get("expired", False) + ["now"] * is_new
        return [state, job.get("id", ""), self._left(key), job.get("expires", ""), *words]

    def _left(self, key: str) -> int:
        return self._ends.get(key, 0) - wall_clock.ms()

    def _lease(self, call: ScriptCall, key: str, token: str, lasts_ms: int, family: str) -> int:
        held = self.value(key)
        if lasts_ms == 0:
            if held == token:
                self.drop(key)
            return 0
        is_free = held in (None, token) or bool(family and held.startswith(family))
        if is_free:
            self.drop(key)
            self.put(key, token, wall_clock.ms() + lasts_ms)
        return int(is_free)

    def _pause(self, call: ScriptCall, key: str, verb: str, field: str = "") -> Any:
        paused = self.value(key, {})
        if verb == "look":
            return [each for item in paused.items() for each in item]
        if verb == "pause":
            paused.setdefault(field, str(wall_clock.ms()))
            self.put(key, paused)
            return paused[field]
        return paused.pop(field, "")


class _Pipeline:
    """The commands of redis-py by which the registry reads, and what they answer.

    Args:
        store: What they read.
    """

    def __init__(self, store: RecordedStore) -> None:
        self._store = store
        self.answers: list[Any] = []

    def __getattr__(self, command: str) -> Any:
        raise NotRecorded(f"what needs {command.upper()} of Redis")

    def get(self, key: str) -> None:
        value = self._store.value(key.replace("}:message:", _RECORD, 1))
        self.answers.append(value.listing.get("message") if isinstance(value, _Noted) else value)

    def set(self, key: str, value: Any, nx: bool) -> None:
        if self._store.value(key) is None:
            self._store.put(key, value)
        self.answers.append(None)

    def delete(self, key: str) -> None:
        self._store.drop(key)
        self.answers.append(1)

    def hmget(self, key: str, *names: str) -> None:
        fields = self._store.value(key, _Noted()).fields
        self.answers.append([fields.get(name) for name in names])

    def zcount(self, key: str, low: float | str, high: float | str) -> None:
        is_open = str(high).startswith("(")
        least, most = float(low), float(str(high).lstrip("("))
        scores = [score for _, score in self._store.listed(key) if score >= least]
        self.answers.append(sum(each < most if is_open else each <= most for each in scores))

    def zrange(self, key: str, start: int, end: int, withscores: bool = False) -> None:
        found = self._store.listed(key)[start : end + 1 or None]
        self.answers.append(found if withscores else [task_id for task_id, _ in found])

    def zmscore(self, key: str, task_ids: Sequence[str]) -> None:
        scores = dict(self._store.listed(key))
        self.answers.append([scores.get(task_id) for task_id in task_ids])
