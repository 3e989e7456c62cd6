"""What a setting takes, and reading groups of settings from the Celery configuration.

The kernel's settings are one group (:mod:`.app.settings`), and those of each addition another one.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from celery_rabbitdelay.app import additions
from celery_rabbitdelay.exceptions import AdditionMissing, InvalidSetting
from celery_rabbitdelay.levels.shown_url import HIDDEN

#: The beginning of all our keys.
PREFIX: Final = "rabbitdelay_"

#: Seconds; no tick and no timeout is longer.
A_YEAR: Final = 366 * 86_400


class SettingType(NamedTuple):
    """What a setting takes.

    Attributes:
        takes: In words, for the error.
        accepts: Returns whether the setting takes a value.
        shown: Returns a value, valid or not, as errors and logs may show it.
    """

    takes: str
    accepts: Callable[[Any], bool]
    shown: Callable[[Any], object] = lambda value: value


def is_number(value: object) -> bool:
    """Return whether a value is a number; bools do not count."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole_number(maximum: int) -> SettingType:
    """Return what takes a whole number from 1 to a maximum."""
    return SettingType(
        f"a whole number from 1 to {maximum}",
        lambda value: isinstance(value, int) and is_number(value) and 1 <= value <= maximum,
    )


def hidden(value: object) -> object:
    """Return what is shown instead of a secret."""
    return HIDDEN if value else value


FLAG: Final = SettingType("True or False", lambda value: isinstance(value, bool))

SECONDS: Final = SettingType(
    "a positive number of seconds, at most 366 days",
    lambda value: is_number(value) and 0 < value <= A_YEAR,
)


@dataclass(frozen=True, repr=False)
class SettingsGroup:
    """Settings that belong together; each attribute is the key without ``rabbitdelay_``.

    A subclass is a frozen dataclass, whose fields have a default, and are annotated with the
    :class:`SettingType` unless they are a bool or a ``Literal``.

    Raises:
        InvalidSetting: A value that a setting does not take.
    """

    def __post_init__(self) -> None:
        for name in setting_types(type(self)):
            self.checked(PREFIX + name, getattr(self, name))

    @classmethod
    def checked(cls, key: str, value: Any) -> Any:
        """Return a value that a call or a command line gives instead of a setting.

        Args:
            key: The setting's key, with or without ``rabbitdelay_``, as the error names it.
            value: The value.

        Raises:
            InvalidSetting: The setting does not take it.
        """
        kind = setting_types(cls)[key.removeprefix(PREFIX)]
        if not kind.accepts(value):
            raise InvalidSetting(key, kind.shown(value), f"takes {kind.takes}")
        return value

    def check_beside(self, groups: Groups) -> None:
        """Refuse what does not fit to the settings of other groups; called once all are read.

        Args:
            groups: The groups that have a key in the configuration, by their classes.

        Raises:
            InvalidSetting: A setting needs another one.
        """

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.shown.items())
        return f"{type(self).__name__}({shown})"

    @property
    def shown(self) -> dict[str, object]:
        """The settings by their names, without secrets and passwords."""
        types = setting_types(type(self))
        return {name: kind.shown(getattr(self, name)) for name, kind in types.items()}


#: Groups by their classes.
Groups: TypeAlias = Mapping[type[SettingsGroup], SettingsGroup]


_TYPES: Final[dict[type[SettingsGroup], dict[str, SettingType]]] = {}


def setting_types(group: type[SettingsGroup]) -> dict[str, SettingType]:
    """Return what each setting of a group takes, by its name."""
    if group not in _TYPES:
        hints = typing.get_type_hints(group, include_extras=True)
        _TYPES[group] = {
            each.name: _type_of(hints[each.name], each.default) for each in fields(group)
        }
    return _TYPES[group]


def _type_of(hint: Any, default: object) -> SettingType:
    """Return what a setting takes: by its type, or as its annotation says; also a default None."""
    if hint is bool:
        return FLAG
    if typing.get_origin(hint) is Literal:
        words = typing.get_args(hint)
        return SettingType(f"one of {', '.join(words)}", lambda value: value in words)
    kind: SettingType = hint.__metadata__[0]
    if default is not None:
        return kind
    return kind._replace(
        takes=f"None, or {kind.takes}", accepts=lambda value: value is None or kind.accepts(value)
    )


def read_settings(
    kernel: type[SettingsGroup], configuration: Mapping[str, Any], namespace: str | None = None
) -> Groups:
    """Read and check our keys in a Celery configuration.

    Args:
        kernel: The group of the kernel, which is read in any case.
        configuration: ``app.conf``, or any mapping.
        namespace: ``app.namespace``: what Django's settings put before each key.

    Returns:
        The kernel's group, and those of the additions that have a key in the configuration.

    Raises:
        InvalidSetting: A key that does not exist, one that Celery does not read, or a value that it
            does not take.
    """
    keys, by_group = _keys(kernel, configuration, namespace), {kernel: dict[str, str]()}
    for name, key in keys.items():
        by_group.setdefault(_group(kernel, name, key), {})[name] = key
    groups = {}
    for group, own in by_group.items():
        try:
            groups[group] = group(**{name: configuration[key] for name, key in own.items()})
        except InvalidSetting as wrong:
            # As the user has written it, for example CELERY_RABBITDELAY_TICK in Django's settings.
            key = keys.get(wrong.key.removeprefix(PREFIX), wrong.key)
            raise InvalidSetting(key, wrong.value, wrong.takes) from wrong.__cause__
    for each in groups.values():
        each.check_beside(groups)
    return groups


def _group(kernel: type[SettingsGroup], name: str, key: str) -> type[SettingsGroup]:
    """Return the group of a setting."""
    if name in setting_types(kernel):
        return kernel
    try:
        group: type[SettingsGroup] = additions.load(additions.settings[name])
    except AdditionMissing as missing:
        raise InvalidSetting(key, HIDDEN, str(missing)) from missing
    return group


def _keys(
    kernel: type[SettingsGroup], configuration: Mapping[str, Any], namespace: str | None
) -> dict[str, str]:
    """Return the key of each setting in a configuration, by the setting's name."""
    known = (*setting_types(kernel), *additions.settings)
    read: dict[str, str] = {}
    unread: dict[str | None, str] = {}
    for key in configuration:
        name = _name_of(key, namespace)
        if name is None:
            unread[_name_in_capitals(key, namespace)] = key
        elif name in known:
            read[name] = key
        else:
            # Without its value: the key may be meant to be one of a secret.
            close = get_close_matches(name, known, 1)
            meant = f"there are {', '.join(PREFIX + each for each in known)}"
            if close:
                meant = f"did you mean {_key_of(close[0], namespace)}?"
            raise InvalidSetting(key, HIDDEN, f"no such setting; {meant}")
    for name in known:
        if name in unread and name not in read:
            key = unread[name]
            kind = setting_types(_group(kernel, name, key))[name]
            reason = f"the setting is not read from this key, write {_key_of(name, namespace)}"
            raise InvalidSetting(key, kind.shown(configuration[key]), reason)
    return read


def _name_of(key: object, namespace: str | None) -> str | None:
    """Return the setting that is read from a configuration key, None if it is not ours."""
    if not isinstance(key, str):
        return None
    if key.startswith(PREFIX):
        return key.removeprefix(PREFIX)
    start = _key_of("", namespace)
    return key.removeprefix(start).lower() if key.startswith(start) else None


def _name_in_capitals(key: object, namespace: str | None) -> str | None:
    """Return the setting that is named by an upper-case key that Celery ignores.

    That is how Celery's own keys were written before 4.0, most of them behind ``CELERY_``, and how
    those of Django are. Behind a namespace, ``CELERY_`` may be another application's namespace.
    """
    capitals = PREFIX.upper()
    if not isinstance(key, str) or not key.isupper():
        return None
    bare = key if namespace else key.removeprefix("CELERY_")
    return bare.removeprefix(capitals).lower() if bare.startswith(capitals) else None


def _key_of(name: str, namespace: str | None) -> str:
    """Return the key of a setting. It is in capitals where the namespace is, as in Celery."""
    if not namespace:
        return PREFIX + name
    key = f"{namespace.rstrip('_')}_{PREFIX}{name}"
    return key.upper() if namespace.isupper() else key.lower()
