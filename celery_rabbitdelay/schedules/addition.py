"""Implements the kernel's extension hooks for the schedules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.app.seams import Addition
from celery_rabbitdelay.app.settings import PREFIX, Groups, SettingsGroup
from celery_rabbitdelay.exceptions import InvalidSetting, RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.registry.application import registry_of
from celery_rabbitdelay.schedules import record
from celery_rabbitdelay.schedules.beat import idle_beat
from celery_rabbitdelay.schedules.schedules import Schedules


@dataclass(frozen=True, repr=False)
class ScheduleSettings(SettingsGroup):
    """The setting of the schedules."""

    #: Whether workers take over Celery's ``beat_schedule`` and ``add_periodic_task``. Their entries
    #: become schedules, and ``celery beat`` is not needed.
    beat: bool = False

    def check_beside(self, groups: Groups) -> None:
        """Refuse ``beat`` without a registry, which stores the schedules."""
        if self.beat and not any(getattr(group, "registry_url", None) for group in groups.values()):
            raise InvalidSetting(f"{PREFIX}beat", True, f"needs {PREFIX}registry_url")


class HasSchedules:
    """Adds ``schedules`` to ``app.rabbitdelay``.

    Args:
        delays: The application's delay levels.
    """

    def __init__(self, delays: Delays) -> None:
        self._delays: Delays = delays

    @property
    def schedules(self) -> Schedules:
        """The recurring tasks: ``put``, ``get``, ``all``, ``delete`` and more."""
        return Schedules(self._delays.app)


class SchedulesAddition(Addition):
    """Stops ``celery beat`` if workers take over its entries; verifies schedules."""

    def problems(self) -> Iterator[tuple[str, str, Mapping[str, object]]]:
        """Yield findings: schedules whose next occurrence is missing, or cannot be sent again."""
        schedules, now_ms = record.Records(registry_of(self.delays)), wall_clock.ms()
        try:
            names = schedules.all()
            late = schedules.overdue(now_ms - record.HEAL_AFTER_MS - record.HEALING_MS)
            found = schedules.get(names)
        except (RegistryUnavailable, OSError) as error:
            yield "registry-unavailable", "Redis", {"error": error}
            return
        for name, noted in zip(names, found, strict=True):
            if noted is None or noted.ahead_ms is None:
                continue  # an unfinished ``put``, or a schedule that has ended
            subject = f"schedule {name}"
            if name in late:
                yield "schedule-overdue", subject, {}
            if not noted.message:
                yield "schedule-lost", subject, {}

    def beat_starts(self, service: Any) -> None:
        """Stop a beat service from sending entries that workers have taken over."""
        if self.delays.setting("beat"):
            idle_beat(service)
