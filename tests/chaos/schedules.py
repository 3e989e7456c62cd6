"""Schedules whose workers, brokers and registry are in trouble all along.

Workers, nodes and Redis are killed, a node is cut off, and Redis is frozen; nobody takes tasks for
a minute; once Redis loses everything, and the schedules are put again, as an application does when
it starts; and once Redis is restored from an older snapshot. At the end, nothing happens for a
while.

Each instant is in the ledger as a sent task. With ``catch_up="all"``, each has to run; of the
others, those of the calm at the end. What was never due must not run, and what runs twice needs a
killed worker, or a Redis that has forgotten.
"""

import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from itertools import cycle
from typing import Any, Final, TypeAlias

from kombu.exceptions import OperationalError
from redis import Redis

from celery_rabbitdelay.exceptions import RabbitDelayError
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.testing import RedisServer
from tests.chaos.ledger import Sent, now_ms
from tests.chaos.network import CUTS
from tests.chaos.programs import make_app
from tests.chaos.stage import SOUND, Stage, done, frozen, killed

#: What each of five schedules promises.
KINDS: Final[tuple[dict[str, Any], ...]] = (
    *({"catch_up": "all", "overlap": "allow"},) * 2,
    {"catch_up": 20.0, "overlap": "allow"},
    {"catch_up": "last", "overlap": "skip"},
    {"catch_up": "last", "overlap": "queue-one"},
)

#: Seconds until the first instants are due, when all schedules are put; and between two troubles.
HEAD_START, REST = 40.0, 12.0

#: Seconds after a trouble in which instants may still be left out because of it: a lease of a
#: killed worker ends after a minute, and what waits for Redis comes back within another half.
AFTERMATH: Final = 90.0

#: Troubles after which Redis no longer knows what was decided before.
EMPTY, BACK = "Redis killed, and empty", "Redis back at an older snapshot"


#: Something that goes wrong: what, for how many seconds, and what makes it.
Trouble: TypeAlias = tuple[str, float, Callable[[], AbstractContextManager[None]]]


def play_schedules(stage: Stage, number: int, seconds: float) -> None:
    """Put schedules, note what has to run, and make all the trouble."""
    redis = stage.redis()
    stage.settings["rabbitdelay_registry_options"] = {"socket_timeout": 5}
    begin_ms = int(time.time() + HEAD_START) * 1000
    end_ms, shift_ms = begin_ms + int(seconds * 1000), now_ms() - time.time() * 1000
    calm_ms = end_ms - min(180.0, seconds / 4) * 1000
    app: Any = make_app(stage.part())
    period = {"start": instant_of(begin_ms), "end": instant_of(end_ms)}
    puts: list[Callable[[], bool]] = []
    for each in range(number):
        # With a second, a busy machine may be late by an interval, which leaves an instant out.
        name, every, kind = f"s{each}", 5 + each % 56, KINDS[each % len(KINDS)]
        puts.append(partial(succeeds, app, name, timedelta(seconds=every), **kind, **period))
        for instant in range(begin_ms, end_ms + 1, every * 1000):
            identity, group, due_ms = f"{name}:{instant:015d}", kind["catch_up"], instant + shift_ms
            has_to = group == "all" or instant > calm_ms + AFTERMATH * 1000
            outcome: Any = "confirmed" if has_to else "unknown"
            stage.ledger.sent[identity] = Sent(identity, str(group), due_ms, due_ms, outcome)

    def put_all() -> None:
        for put in puts:
            stage.wait(put, "a put", 300)

    put_all()
    for node in range(3):
        stage.worker(SOUND, first_node=node)
    once, regular = troubles_of(stage, redis)
    planned, always = len(once) + 1, cycle(regular)
    stage.pause((begin_ms + shift_ms - now_ms()) / 1000)
    while time.time() * 1000 < calm_ms:
        over = (time.time() * 1000 - begin_ms) / (calm_ms - begin_ms)
        is_time = once and over > (planned - len(once)) / planned
        for what, lasts, make in (regular[0], once.pop(0) if is_time else next(always)):
            stage.pause(REST / 2)
            with stage.trouble(what):
                with make():
                    stage.pause(lasts)
                if what == EMPTY:
                    put_all()
    stage.say(f"calm; {len(once)} kinds of trouble were left out")
    stage.pause((end_ms + shift_ms - now_ms()) / 1000)
    app.close()
    # Nothing else explains a second run.
    stage.ledger.troubles = [each for each in stage.ledger.troubles if each.what in (EMPTY, BACK)]


def succeeds(app: Any, name: str, every: timedelta, **options: Any) -> bool:
    """Put a schedule; return whether that succeeds, as it may not while there is trouble."""
    try:
        app.rabbitdelay.schedules.put(name, "note", every, **options)
    except (RabbitDelayError, OperationalError):
        return False
    return True


def troubles_of(stage: Stage, redis: RedisServer) -> tuple[list[Trouble], list[Trouble]]:
    """Return the troubles that come once, and those that come again and again."""
    cluster: Any = stage.cluster
    dump, older = redis.folder / "dump.rdb", redis.folder / "older.rdb"

    @contextmanager
    def redis_away(act: Callable[..., object], *given: object) -> Iterator[None]:
        """Redis is killed, and has what is in its dump when it is back."""
        with Redis.from_url(redis.url) as client:
            client.save()
        redis.kill()
        act(*given)
        yield
        redis.start()

    @contextmanager
    def stopped() -> Iterator[None]:
        workers, stage.workers = stage.workers, []
        with done("end", "begin", workers):
            yield
        stage.workers = workers

    once: list[Trouble] = [
        ("all workers stopped", 60, stopped),
        (EMPTY, 10, lambda: redis_away(dump.unlink)),
        (BACK, 10, lambda: redis_away(shutil.copy, older, dump)),
    ]
    return once, [
        ("worker killed", 0, lambda: done("kill", "begin", [random.choice(stage.workers)])),
        ("Redis killed", 10, lambda: redis_away(shutil.copy, dump, older)),
        ("node killed", 10, lambda: killed([random.choice(cluster.nodes)])),
        ("partition", 10, lambda: cluster.cut(CUTS["node"])),
        ("Redis frozen", 10, lambda: frozen([redis])),
    ]
