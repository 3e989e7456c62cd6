"""The API for additions of your own; the page "Add your own" is the guide."""

from celery_rabbitdelay.app.additions import Entry, add
from celery_rabbitdelay.app.seams import AddedToRows, AddedToSend, Addition, Send
from celery_rabbitdelay.app.settings import SettingsGroup, SettingType

__all__ = [
    "AddedToRows",
    "AddedToSend",
    "Addition",
    "Entry",
    "Send",
    "SettingType",
    "SettingsGroup",
    "add",
]
