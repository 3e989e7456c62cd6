"""The setting of the web page."""

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
    """The setting of the web page."""

    #: The options of the web page (:func:`celery_rabbitdelay.web.application`): its users, their
    #: roles, and what it shows. None: the page is read-only, and only for this machine.
    web: Annotated[Mapping[str, Any] | None, _WEB] = None
