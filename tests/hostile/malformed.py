"""Tasks whose fields have any value: each of Celery's, in both versions of its protocol."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, Final

from celery import Celery

from tests.hostile.fields import any_field

#: The names of tasks: a plain one, one that has a rate limit, and one that nobody has.
NAMES: Final = ("hostile", "hostile", "hostile", "hostile-limited", "unknown")

#: One that the worker itself holds until its ``eta``, in place of another task.
HELD: Final = "hostile-held"

#: What Celery writes, and what it reads beside that.
FIELDS: Final = (
    *Celery(set_as_current=False).amqp.as_task_v2("1", "t").headers,
    *("chord", "chain", "callbacks", "errbacks", "taskset", "utc", "args", "kwargs", "headers"),
    *("groups", "compression", "hostname", "delivery_info", "properties", "update", "get"),
)

#: Instants, well-formed or not.
INSTANTS: Final = (
    *("", "0", "tomorrow", "2027-13-01T00:00:00", "2027-01-01", "1999-01-01T00:00:00Z"),
    *("0001-01-01T00:00:00", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"),
    *("2999-01-01T00:00:00+00:00", "\ud800", "20270101T000000", "24:00", "2027-W01-1"),
)

#: Makes a value that both AMQP and JSON have.
_VALUES: Final[tuple[Callable[[Random], Any], ...]] = (
    lambda random: random.choice(INSTANTS),
    lambda random: random.choice((0, 1, -1, 0.2, 2**63 - 1, -(2**63), 1e308, -1e308, 5e-324)),
    lambda random: random.choice((float("nan"), float("inf"), -float("inf"))),
    lambda random: random.choice((None, True, False)),
    lambda random: random.choice(("a", "ab", "abc", "#", "args", "5")),
    lambda random: [value(random) for _ in range(random.randint(0, 3))],
    lambda random: {key: value(random) for key in "ab"[: random.randint(0, 2)]},
)

#: Stands for lists within each other.
_DEEP: Final = "deep"

#: Values of JSON, beside what AMQP has: what kombu decodes, and integers without end.
_OF_JSON: Final = (
    *({"__type__": "datetime", "__value__": value} for value in INSTANTS[:3]),
    *({"__type__": "unknown", "__value__": 1}, {"__type__": "bytes", "__value__": "x"}),
    *(10**400, -(10**400), "x" * 3000, *(_DEEP,) * 4),
)

#: Bodies of protocol 2 that have no parts.
_BODIES: Final = (b"", b"5", b"null", b'"args"', b'["args",{},{}]', b"[", b"{}", b"\xff")


def value(random: Random) -> Any:
    """A value that both AMQP and JSON have."""
    return random.choice(_VALUES)(random)


def malformed(random: Random) -> tuple[dict[str, Any], bytes]:
    """Headers and body of a task with something wrong in it, or not."""
    task: dict[str, Any] = {"task": random.choice(NAMES), "id": f"{random.getrandbits(64):x}"}
    changes = {name: value(random) for name in random.sample(FIELDS, random.randint(1, 3))}
    if random.random() < 0.01:
        soon = datetime.now(UTC) + timedelta(seconds=1)
        task |= {"task": HELD, "eta": soon.isoformat()}
        changes.pop("eta", None)
    elif random.random() < 0.1:
        del task[random.choice(list(task))]
    if random.random() < 0.5:
        task |= changes
        changes = {}
    version = random.choice((1, 2, 2, "hybrid"))
    body: dict[str, Any] = {"args": [], "kwargs": {}, **changes}
    if version == 1:
        if random.random() < 0.3 and task.get("task") != HELD:
            changes |= {"utc": True, random.choice(FIELDS): _json(random)}
        return {}, _written(random, {**body, **task, **changes})
    if random.random() < 0.2:
        task[random.choice(FIELDS)] = any_field(random)
    if version == "hybrid":
        del body[random.choice(list(body))]
        return task, _written(random, body)
    return task, _body(random)


def _body(random: Random) -> bytes:
    """The body of protocol 2, with parts that are missing, or too many, or of any type."""
    parts: list[Any] = [[], {}, dict.fromkeys(("callbacks", "errbacks", "chain", "chord"))]
    choice = random.random()
    if choice > 0.9:
        return random.choice(_BODIES)
    if choice > 0.7:
        parts = random.choice((parts[:1], parts[:2], [*parts, {}], [*parts, parts[2]], []))
    elif choice > 0.4:
        parts[random.randrange(3)] = _json(random)
    return _written(random, parts)


def _json(random: Random) -> Any:
    return random.choice(_OF_JSON) if random.random() < 0.3 else value(random)


def _written(random: Random, body: Any) -> bytes:
    separators = random.choice(((",", ":"), (", ", ": ")))
    depth = random.randint(100, 1000)  # about as deep as Python reads, and the pool writes
    deep = b"[" * depth + b"]" * depth
    return json.dumps(body, separators=separators).encode().replace(f'"{_DEEP}"'.encode(), deep)
