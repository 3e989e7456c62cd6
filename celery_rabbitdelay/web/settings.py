"""The setting of the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from celery_rabbitdelay.app.settings import SettingsGroup, SettingType, hidden

_WEB: Final = SettingType(
    "a mapping of arguments of celery_rabbitdelay.web.application",
    lambda value: isinstance(value, Mapping),
    lambda value: hidden(value) if isinstance(value, Mapping) else value,
)


@dataclass(frozen=True, repr=False)
class WebSettings(SettingsGroup):
    """The setting of the page."""

    #: Arguments of :func:`celery_rabbitdelay.web.application`, the page that shows what waits: who
    #: may see it and act, and what it shows. None: only this machine may see it, and nobody act.
    web: Annotated[Mapping[str, Any] | None, _WEB] = None
