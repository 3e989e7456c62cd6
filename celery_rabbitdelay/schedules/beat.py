"""Stores Celery's ``beat_schedule`` as schedules, if ``rabbitdelay_beat`` is set."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Container, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final

from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_rabbitdelay.app.delays import DelayingCelery
from celery_rabbitdelay.exceptions import TEMPORARY_ERRORS, InvalidSchedule, RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.schedules.recurrence import Occurrence
from celery_rabbitdelay.schedules.schedules import OPTIONS, Schedules

logger = logging.getLogger(__name__)

#: The arguments of :meth:`.Schedules.put` that an entry's options may contain.
OF_PUT: Final = frozenset(Schedules.put.__kwdefaults__ or ())

#: How long workers do not store replaced beat entries again, in milliseconds.
FLAPPING_MS: Final = 3_600_000

_FORMER: Final = (
    "rabbitdelay_beat: code deployed later has replaced this code's beat entries. If you rolled "
    "back to this code, run: celery rabbitdelay schedules put-beat"
)


class _Plan(Schedules):
    """Collects the schedules instead of storing them.

    Attributes:
        puts: The arguments of ``_put`` by schedule name: first occurrence, message, and whether the
            schedule is paused.
    """

    def __init__(self, app: DelayingCelery) -> None:
        super().__init__(app)
        self.puts: dict[str, tuple[Occurrence, str, bool | None]] = {}

    def _put(self, made: Occurrence, message: str, paused: bool | None) -> None:
        self.puts[made.name] = made, message, paused


class BeatEntries:
    """The entries of an application's ``beat_schedule``, including beat's own default entries.

    Args:
        schedules: The schedules of the application.

    Attributes:
        puts: The arguments of ``_put`` by schedule name, before anything is stored.
        digest: A hash of the entries; all processes with the same code compute the same hash.
    """

    def __init__(self, schedules: Schedules) -> None:
        from celery.beat import Scheduler  # a slow import (20 ms) that few programs need

        app = schedules.app
        self._schedules, self._application = schedules, str(app.main or "")
        self._prefix = f"beat:{self._application}:"
        self._records = schedules._records
        self._is_current: bool | None = None
        # Finalize the application first, as a worker does, because this may add entries.
        app.loader.import_default_modules()
        app.finalize()
        plan = _Plan(app)
        scheduler = Scheduler(app, lazy=True)
        scheduler.merge_inplace(app.conf.beat_schedule)
        scheduler.install_default_entries(scheduler.schedule)
        for name, entry in scheduler.schedule.items():
            _plan_entry(plan, f"{self._prefix}{name}", entry)
        self.puts = plan.puts
        entries = sorted((name, made.revision, str(p)) for name, (made, _, p) in self.puts.items())
        self.digest = hashlib.sha256(repr(entries).encode()).hexdigest()[:24]

    def put(self, *, is_forced: bool = False) -> bool:
        """Store the entries as schedules, and delete schedules whose entries no longer exist.

        While workers of two versions of the code are deployed, workers of the earlier version
        change nothing: replaced entries are not stored again for an hour.

        Args:
            is_forced: Whether to store the entries even if later code has replaced them, because
                you rolled back to this code.

        Returns:
            Whether the schedules now match this code.
        """
        with self._records.registry.alone(self._prefix):
            found = self._records.taken_over(self._application)
            if not is_forced and int(found.get(self.digest, 0)) > wall_clock.ms() - FLAPPING_MS:
                logger.warning(_FORMER)
                return False
            # Store the hash first: if Redis then loses schedules that are stored below, it has
            # lost the hash too.
            if found.get("current") != self.digest:
                self._records.take_over(self._application, found.get("current"), self.digest)
            for name, put in self.puts.items():
                with _logged(name):
                    self._schedules._put(*put)
            self.end(self.puts)
        return True

    def keep(self) -> None:
        """Store the entries unless Redis has them; workers call this regularly."""
        known = self._is_current is not None
        found = self._records.taken_over(self._application) if known else {}
        if found.get("current") == self.digest:
            self._is_current = True
        elif self.digest in found:
            self._is_current = False
        elif self._is_current is not False:  # False: workers of later code stored theirs
            self._is_current = self.put()

    def end(self, kept: Container[str] = ()) -> None:
        """Delete all schedules of ``beat_schedule`` except the given names."""
        for name in self._records.all():
            if name.startswith(self._prefix) and name not in kept:
                self._schedules.delete(name)


@contextmanager
def _logged(name: str) -> Iterator[None]:
    """Log an invalid entry instead of raising, so that the other entries are stored."""
    try:
        yield
    except (*TEMPORARY_ERRORS, RegistryUnavailable):
        raise
    except Exception as error:  # noqa: BLE001 - an entry may contain anything
        logger.error("Beat entry %r is invalid and does not run: %s", name, error)


def _plan_entry(plan: _Plan, name: str, entry: Any) -> None:
    """Plan an entry, and leave out options that a schedule does not take."""
    with _logged(name):
        given = dict(entry.options)
        options: dict[str, Any] = {"overlap": "allow"}  # as with beat
        expires = given.pop("expires", None)
        expires = maybe_iso8601(expires) if isinstance(expires, str) else expires
        if isinstance(expires, datetime):
            options["end"] = maybe_make_aware(expires)
        elif expires is not None:
            # Celery counts expires from the send, which is the occurrence's due time.
            options["catch_up"] = expires
        options |= {key: given.pop(key) for key in (OPTIONS | OF_PUT) & given.keys()}
        if given:
            left_out = ", ".join(sorted(given))
            logger.warning("Beat entry %r runs without its unsupported options: %s", name, left_out)
        args, kwargs = entry.args or (), entry.kwargs
        if any(type(value).__name__ == "BeatLazyFunc" for value in (*args, *kwargs.values())):
            raise InvalidSchedule(args, "a BeatLazyFunc would have to be computed at each send")
        plan.put(name, entry.task, entry.schedule, args, kwargs, **options)


def idle_beat(sender: Any, **_: Any) -> None:
    """Keep ``celery beat`` from sending if workers have taken over its entries."""
    if not sender.app.rabbitdelay.available:
        return
    from celery import beat  # a slow import (20 ms) that few programs need

    scheduler = sender.scheduler
    if type(scheduler) not in (beat.Scheduler, beat.PersistentScheduler):
        logger.warning("rabbitdelay_beat: celery beat keeps sending: it has a custom scheduler.")
        return
    logger.warning("rabbitdelay_beat: celery beat sends nothing; workers send its entries.")
    scheduler.tick = lambda *_, **__: scheduler.max_interval
