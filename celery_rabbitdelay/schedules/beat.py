"""The entries of ``celery beat`` as schedules, with ``rabbitdelay_beat``."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary

from celery.utils.time import maybe_iso8601, maybe_make_aware, maybe_timedelta

from celery_rabbitdelay.app.delays import DelayingCelery
from celery_rabbitdelay.app.task import TEMPORARY_ERRORS
from celery_rabbitdelay.exceptions import InvalidSchedule, RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.registry.application import registry_of
from celery_rabbitdelay.schedules.record import Records
from celery_rabbitdelay.schedules.schedules import OPTIONS, Put, Schedules

logger = logging.getLogger(__name__)

#: What :meth:`.Schedules.put` takes beside the options of a send; an entry's options may name it.
OF_PUT: Final = frozenset(Schedules.put.__kwdefaults__ or ())

#: For how many milliseconds entries of beat do not come back that others have taken the place of.
FLAPPING_MS: Final = 3_600_000

_FORMER: Final = (
    "The entries of beat are those of other code, which was deployed later; if this code was "
    "rolled back: celery rabbitdelay schedules put-beat"
)

#: The digest of the entries that this process put last, for each application; see :func:`_digest`.
_DIGESTS: Final[WeakKeyDictionary[Any, str]] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Plan(Schedules):
    """Schedules that stay as they are.

    Attributes:
        puts: What would be put, by the names of the schedules.
    """

    puts: dict[str, Put] = field(default_factory=dict)

    def _put(self, put: Put, records: Records) -> None:
        self.puts[put.occurrence.name] = put


def put_beat(schedules: Schedules, *, is_forced: bool = False) -> bool:
    """Put the entries of Celery's ``beat_schedule``, and end those that are not there any more.

    Workers call this when they start, with ``rabbitdelay_beat = True``. While workers of two
    versions of the code are deployed, those of the former version change nothing: entries that
    others have taken the place of are not put again for an hour.

    Args:
        schedules: The schedules of the application.
        is_forced: Put them all the same, because the code was rolled back.

    Returns:
        Whether they are as this code has them.
    """
    app, puts = schedules.app, _puts(schedules.app)
    registry, application = registry_of(app.rabbitdelay), str(app.main or "")
    records, digest = Records(registry), _digest(puts)
    _DIGESTS[app] = digest
    with registry.alone_under(_prefix(app)):
        found = records.taken_over(application)
        if not is_forced and int(found.get(digest, 0)) > wall_clock.ms() - FLAPPING_MS:
            logger.warning(_FORMER)
            return False
        # First of all: if Redis loses what is put meanwhile, it has lost this as well.
        if found.get("current") != digest:
            records.take_over(application, found.get("current"), digest)
        for name, put in puts.items():
            with _logged(name):
                schedules._put(put, records)
        end_beat(schedules, puts)
    return True


def state_of_beat(schedules: Schedules) -> Literal["current", "former", "lost"]:
    """Return what Redis knows of the entries that this process has put last.

    Others may have taken their place, or Redis has lost them.
    """
    app = schedules.app
    found, digest = (
        Records(registry_of(app.rabbitdelay)).taken_over(str(app.main or "")),
        _DIGESTS[app],
    )
    if found.get("current") == digest:
        return "current"
    return "former" if digest in found else "lost"


def plan_beat(schedules: Schedules, *, ends: bool = False) -> dict[str, str]:
    """Return what :func:`put_beat`, or :func:`end_beat`, would do, by the names of schedules."""
    puts = {} if ends else _puts(schedules.app)
    known = Records(registry_of(schedules.app.rabbitdelay)).get([*puts])
    told = dict.fromkeys(_others(schedules, puts), "ended")
    for (name, put), before in zip(puts.items(), known, strict=True):
        was = before and before.occurrence
        if was is None or was.revision != put.occurrence.revision:
            told[name] = "put" if was is None else "changed"
    return told


def end_beat(schedules: Schedules, kept: Container[str] = ()) -> None:
    """End the schedules that were put for ``beat_schedule``, but those kept."""
    for name in _others(schedules, kept):
        schedules.delete(name)


def _puts(app: DelayingCelery) -> dict[str, Put]:
    """Return what an application's entries put, by the names of their schedules."""
    # As a worker has done: entries may be added when the application is finalized.
    app.loader.import_default_modules()
    app.finalize()
    plan = _Plan(app)
    for name, entry in {**_entries_of_celery(app), **app.conf.beat_schedule}.items():
        _plan_entry(plan, f"{_prefix(app)}{name}", entry)
    return plan.puts


def _digest(puts: Mapping[str, Put]) -> str:
    """Return a digest of the entries, which is equal in all processes of the same code."""
    said = sorted((name, put.occurrence.revision, str(put.paused)) for name, put in puts.items())
    return hashlib.sha256(repr(said).encode()).hexdigest()[:24]


def _prefix(app: DelayingCelery) -> str:
    """Return what the names of an application's entries begin with."""
    return f"beat:{app.main or ''}:"


def _others(schedules: Schedules, kept: Container[str]) -> list[str]:
    """Return the names of the schedules of entries that are not among those kept."""
    names, prefix = Records(registry_of(schedules.app.rabbitdelay)).all(), _prefix(schedules.app)
    return [name for name in names if name.startswith(prefix) and name not in kept]


@contextmanager
def _logged(name: str) -> Iterator[None]:
    """Log what is wrong with an entry; the others are put all the same."""
    try:
        yield
    except (*TEMPORARY_ERRORS, RegistryUnavailable):
        raise
    except Exception as error:  # noqa: BLE001 - of any kind: an entry may say anything
        logger.error("The entry %r of beat cannot be a schedule: %s", name, error)


def _plan_entry(plan: _Plan, name: str, entry: Mapping[str, Any]) -> None:
    """Plan an entry without the options that a schedule does not take."""
    with _logged(name):
        given = dict(entry.get("options") or {})
        options: dict[str, Any] = {"overlap": "allow"}  # as with beat
        expires = given.pop("expires", None)
        expires = maybe_iso8601(expires) if isinstance(expires, str) else expires
        if isinstance(expires, datetime):
            options["end"] = maybe_make_aware(expires)
        elif expires is not None:
            # Celery counts it from the send, which is when the occurrence is due.
            options["catch_up"] = expires
        options |= {key: given.pop(key) for key in (OPTIONS | OF_PUT) & given.keys()}
        if given:
            left_out = ", ".join(sorted(given))
            logger.warning("The entry %r of beat runs without its options: %s", name, left_out)
        when = maybe_timedelta(entry["schedule"])
        args, kwargs = entry.get("args") or (), entry.get("kwargs") or {}
        if any(type(each).__name__ == "BeatLazyFunc" for each in (*args, *kwargs.values())):
            raise InvalidSchedule(args, "takes no BeatLazyFunc: it is computed at each send")
        plan.put(name, entry["task"], when, args, kwargs, **options)


def _entries_of_celery(app: DelayingCelery) -> dict[str, Any]:
    """Return what beat adds by itself, in ``celery.beat.Scheduler``."""
    if not app.conf.result_expires or app.backend.supports_autoexpire:
        return {}
    entry = {"schedule": "0 4 * * *", "options": {"expires": 12 * 3600}}
    return {"celery.backend_cleanup": {"task": "celery.backend_cleanup", **entry}}


def idle_beat(sender: Any, **_: Any) -> None:
    """Let ``celery beat`` send nothing if workers have taken over what it would send."""
    if not sender.app.rabbitdelay.available:
        return
    from celery import beat  # it takes 20 ms, which all other programs need not

    scheduler = sender.scheduler
    if type(scheduler) not in (beat.Scheduler, beat.PersistentScheduler):
        logger.warning("Beat goes on beside rabbitdelay_beat: it has a scheduler of its own.")
        return
    logger.warning("Beat sends nothing, and is not needed: workers do it (rabbitdelay_beat).")
    scheduler.tick = lambda *_, **__: scheduler.max_interval
