"""The entries of ``celery beat`` as schedules, with ``rabbitdelay_beat``."""

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

#: What :meth:`.Schedules.put` takes beside the options of a send; an entry's options may name it.
OF_PUT: Final = frozenset(Schedules.put.__kwdefaults__ or ())

#: For how many milliseconds entries of beat do not come back that others have taken the place of.
FLAPPING_MS: Final = 3_600_000

_FORMER: Final = (
    "The entries of beat are those of other code, which was deployed later; if this code was "
    "rolled back: celery rabbitdelay schedules put-beat"
)


class _Plan(Schedules):
    """Schedules that stay as they are.

    Attributes:
        puts: What would be put, by the names of the schedules: their first occurrences, what they
            send, and whether they are paused.
    """

    def __init__(self, app: DelayingCelery) -> None:
        super().__init__(app)
        self.puts: dict[str, tuple[Occurrence, str, bool | None]] = {}

    def _put(self, made: Occurrence, message: str, paused: bool | None) -> None:
        self.puts[made.name] = made, message, paused


class BeatEntries:
    """The entries of an application's ``beat_schedule``, and what beat adds by itself.

    Args:
        schedules: The schedules of the application.

    Attributes:
        puts: What they put, by the names of their schedules.
        digest: Equal in all processes of the same code.
    """

    def __init__(self, schedules: Schedules) -> None:
        from celery.beat import Scheduler  # it takes 20 ms, which all other programs need not

        app = schedules.app
        self._schedules, self._application = schedules, str(app.main or "")
        self._prefix = f"beat:{self._application}:"
        self._records = schedules._records
        self._is_current: bool | None = None
        # As a worker has done: entries may be added when the application is finalized.
        app.loader.import_default_modules()
        app.finalize()
        plan = _Plan(app)
        scheduler = Scheduler(app, lazy=True)
        scheduler.merge_inplace(app.conf.beat_schedule)
        scheduler.install_default_entries(scheduler.schedule)
        for name, entry in scheduler.schedule.items():
            _plan_entry(plan, f"{self._prefix}{name}", entry)
        self.puts = plan.puts
        said = sorted((name, made.revision, str(p)) for name, (made, _, p) in self.puts.items())
        self.digest = hashlib.sha256(repr(said).encode()).hexdigest()[:24]

    def put(self, *, is_forced: bool = False) -> bool:
        """Put the entries, and end those that are not there any more.

        While workers of two versions of the code are deployed, those of the former version change
        nothing: entries that others have taken the place of are not put again for an hour.

        Args:
            is_forced: Put them all the same, because the code was rolled back.

        Returns:
            Whether they are as this code has them.
        """
        with self._records.registry.alone(self._prefix):
            found = self._records.taken_over(self._application)
            if not is_forced and int(found.get(self.digest, 0)) > wall_clock.ms() - FLAPPING_MS:
                logger.warning(_FORMER)
                return False
            # First of all: if Redis loses what is put meanwhile, it has lost this as well.
            if found.get("current") != self.digest:
                self._records.take_over(self._application, found.get("current"), self.digest)
            for name, put in self.puts.items():
                with _logged(name):
                    self._schedules._put(*put)
            self.end(self.puts)
        return True

    def keep(self) -> None:
        """Put the entries once, and again whenever Redis has lost them; workers call this."""
        known = self._is_current is not None
        found = self._records.taken_over(self._application) if known else {}
        if found.get("current") == self.digest:
            self._is_current = True
        elif self.digest in found:
            self._is_current = False
        elif self._is_current is not False:  # workers of later code put theirs
            self._is_current = self.put()

    def end(self, kept: Container[str] = ()) -> None:
        """End the schedules that were put for ``beat_schedule``, but those kept."""
        for name in self._records.all():
            if name.startswith(self._prefix) and name not in kept:
                self._schedules.delete(name)


@contextmanager
def _logged(name: str) -> Iterator[None]:
    """Log what is wrong with an entry; the others are put all the same."""
    try:
        yield
    except (*TEMPORARY_ERRORS, RegistryUnavailable):
        raise
    except Exception as error:  # noqa: BLE001 - of any kind: an entry may say anything
        logger.error("The entry %r of beat cannot be a schedule: %s", name, error)


def _plan_entry(plan: _Plan, name: str, entry: Any) -> None:
    """Plan an entry without the options that a schedule does not take."""
    with _logged(name):
        given = dict(entry.options)
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
        args, kwargs = entry.args or (), entry.kwargs
        if any(type(each).__name__ == "BeatLazyFunc" for each in (*args, *kwargs.values())):
            raise InvalidSchedule(args, "takes no BeatLazyFunc: it is computed at each send")
        plan.put(name, entry.task, entry.schedule, args, kwargs, **options)


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
