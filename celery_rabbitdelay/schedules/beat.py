"""The entries of ``celery beat`` as schedules, with ``rabbitdelay_beat``."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_rabbitdelay.app.task import TEMPORARY_ERRORS
from celery_rabbitdelay.exceptions import InvalidSchedule, RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.schedules.record import Records
from celery_rabbitdelay.schedules.schedules import OPTIONS, Put, Schedule, Schedules

logger = logging.getLogger(__name__)

#: What :meth:`.Schedules.put` takes beside the options of a send; an entry's options may name it.
OF_PUT: Final = frozenset(Schedules.put.__kwdefaults__ or ())

#: For how many milliseconds entries of beat do not come back that others have taken the place of.
FLAPPING_MS: Final = 3_600_000


@dataclass(frozen=True)
class Rehearsal(Schedules):
    """Schedules that stay as they are.

    Attributes:
        told: What would become of those that are put and deleted, by their names.
    """

    told: dict[str, Literal["put", "changed", "ended"]] = field(default_factory=dict)

    def _put(self, put: Put, records: Records) -> Schedule | None:
        name = put.occurrence.name
        (before,) = records.get([name])
        if before is None or before.occurrence is None:
            self.told[name] = "put"
        elif before.occurrence.revision != put.occurrence.revision:
            self.told[name] = "changed"
        return None

    def delete(self, name: str) -> bool:
        """Note that a schedule would end; return whether there is one."""
        is_known = self.get(name) is not None
        if is_known:
            self.told[name] = "ended"
        return is_known


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
    app = schedules.app
    # As a worker has done: entries may be added when the application is finalized.
    app.loader.import_default_modules()
    app.finalize()
    registry, application, prefix = app.rabbitdelay.registry, str(app.main or ""), _prefix(app)
    records = Records(registry)
    entries = _entries(app)
    digest = _digest(entries)
    with registry.alone_under(prefix):
        found = records.taken_over(application)
        ended_ms = int(found.get(digest, 0))
        if ended_ms > wall_clock.ms() - FLAPPING_MS and not is_forced:
            logger.warning(
                "The entries of beat are those of other code, which was deployed later; if "
                "this code was rolled back: celery rabbitdelay schedules put-beat"
            )
            return False
        for name, entry in entries.items():
            _put_entry(schedules, name, entry)
        if found.get("current") != digest:
            _end_others(schedules, entries)
            if not isinstance(schedules, Rehearsal):
                former = found.get("current")
                records.take_over(application, former, digest)
    return True


def state_of_beat(schedules: Schedules) -> Literal["current", "former", "lost"]:
    """Return what Redis knows of this code's entries: whether others have taken their place."""
    app = schedules.app
    found = Records(app.rabbitdelay.registry).taken_over(str(app.main or ""))
    digest = _digest(_entries(app))
    if found.get("current") == digest:
        return "current"
    return "former" if digest in found else "lost"


def end_beat(schedules: Schedules) -> None:
    """End all schedules that were put for ``beat_schedule``: beat runs it again."""
    _end_others(schedules, ())


def _entries(app: Any) -> dict[str, Any]:
    """Return an application's entries by the names of their schedules."""
    given = {**_entries_of_celery(app), **app.conf.beat_schedule}
    return {f"{_prefix(app)}{name}": each for name, each in given.items()}


def _digest(entries: Mapping[str, Any]) -> str:
    said = repr(sorted((name, repr(entry)) for name, entry in entries.items()))
    return hashlib.sha256(said.encode()).hexdigest()[:24]


def _prefix(app: Any) -> str:
    """Return what the names of an application's entries begin with."""
    return f"beat:{app.main or ''}:"


def _end_others(schedules: Schedules, kept: Container[str]) -> None:
    """End the schedules of entries that are not among those kept."""
    for name in Records(schedules.app.rabbitdelay.registry).all():
        if name.startswith(_prefix(schedules.app)) and name not in kept:
            schedules.delete(name)


def _put_entry(schedules: Schedules, name: str, entry: Mapping[str, Any]) -> None:
    """Put an entry without the options that a schedule does not take."""
    try:
        given = dict(entry.get("options") or {})
        options: dict[str, Any] = {"overlap": "allow"}  # as with beat
        expires = given.pop("expires", None)
        if isinstance(expires, str):
            expires = maybe_iso8601(expires)
        if isinstance(expires, datetime):
            options["end"] = maybe_make_aware(expires)
        elif expires is not None:
            # Celery counts it from the send, which is when the occurrence is due.
            options["catch_up"] = expires
        options |= {key: given.pop(key) for key in (OPTIONS | OF_PUT) & given.keys()}
        if given:
            left_out = ", ".join(sorted(given))
            logger.warning("The entry %r of beat runs without its options: %s", name, left_out)
        when = entry["schedule"]
        if isinstance(when, int | float):
            when = timedelta(seconds=when)
        args, kwargs = entry.get("args") or (), entry.get("kwargs") or {}
        if any(type(each).__name__ == "BeatLazyFunc" for each in (*args, *kwargs.values())):
            raise InvalidSchedule(args, "takes no BeatLazyFunc: it is computed at each send")
        schedules.put(name, entry["task"], when, args, kwargs, **options)
    except (*TEMPORARY_ERRORS, RegistryUnavailable):
        raise
    except Exception as error:  # noqa: BLE001 - whatever it says, the others are put
        logger.error("The entry %r of beat cannot be a schedule: %s", name, error)


def _entries_of_celery(app: Any) -> dict[str, Any]:
    """Return what beat adds by itself, in ``celery.beat.Scheduler``."""
    if not app.conf.result_expires or app.backend.supports_autoexpire:
        return {}
    from celery.schedules import crontab

    entry = {"schedule": crontab("0", "4", "*"), "options": {"expires": 12 * 3600}}
    return {"celery.backend_cleanup": {"task": "celery.backend_cleanup", **entry}}


def idle_beat(sender: Any, **_: Any) -> None:
    """Let ``celery beat`` send nothing if workers have taken over what it would send."""
    delays = getattr(sender.app, "rabbitdelay", None)
    if delays is None or not delays.settings.beat or not delays.available:
        return
    from celery import beat  # it takes 20 ms, which all other programs need not

    scheduler = sender.scheduler
    if type(scheduler) not in (beat.Scheduler, beat.PersistentScheduler):
        logger.warning("Beat goes on beside rabbitdelay_beat: it has a scheduler of its own.")
        return
    logger.warning("Beat sends nothing, and is not needed: workers do it (rabbitdelay_beat).")
    scheduler.tick = lambda *_, **__: scheduler.max_interval
