"""The ``rabbitdelay_*`` keys of the Celery configuration: their meanings and their values.

The kernel's settings form one group, and the settings of each addition form another group.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fractions import Fraction
from functools import cached_property
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias, TypeGuard, TypeVar

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app import additions
from celery_rabbitdelay.levels.delay import Due, check_max_delay
from celery_rabbitdelay.levels.layout import NAMED, Layout, custom
from celery_rabbitdelay.levels.shown_url import HIDDEN
from celery_rabbitdelay.levels.topology import CHECK_IN, DISTRIBUTE, QueueType, Topology
from celery_rabbitdelay.modules.deliveries import MAX_PREFETCH
from celery_rabbitdelay.publishing.message import DEFAULT_MAX_MESSAGE_BYTES
from celery_rabbitdelay.publishing.signature import MIN_KEY_BYTES, SigningKeys

ValueT = TypeVar("ValueT")

#: The prefix of all keys of this package.
PREFIX: Final = "rabbitdelay_"

#: The longest tick and the longest timeout, in seconds.
A_YEAR: Final = 366 * 86_400


class SettingType(NamedTuple):
    """The values that a setting takes.

    Attributes:
        takes: The values in words, for errors.
        accepts: Returns whether the setting takes a value.
        shown: Returns a value, valid or not, as errors and logs may show it.
    """

    takes: str
    accepts: Callable[[object], bool]
    shown: Callable[[object], object] = lambda value: value


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number; bools do not count."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole_number(maximum: int) -> SettingType:
    """Return the type of whole numbers from 1 to a maximum."""
    return SettingType(
        f"a whole number from 1 to {maximum}",
        lambda value: isinstance(value, int) and is_number(value) and 1 <= value <= maximum,
    )


def hidden(value: object) -> object:
    """Return the text that is shown instead of a secret."""
    return HIDDEN if value else value


FLAG: Final = SettingType("True or False", lambda value: isinstance(value, bool))

SECONDS: Final = SettingType(
    "a positive number of seconds, at most 366 days",
    lambda value: is_number(value) and 0 < value <= A_YEAR,
)


@dataclass(frozen=True, repr=False)
class SettingsGroup:
    """Settings that belong together; each attribute is the key without ``rabbitdelay_``.

    A subclass is a frozen dataclass. Each field has a default, and a :class:`SettingType` in its
    annotation unless it is a bool or a ``Literal``.

    Raises:
        InvalidSetting: A value is invalid.
    """

    def __post_init__(self) -> None:
        for name in setting_types(type(self)):
            self.checked(PREFIX + name, getattr(self, name))

    @classmethod
    def checked(cls, key: str, value: ValueT) -> ValueT:
        """Check a value that a call or a command line gives instead of a setting; return it.

        Args:
            key: The setting's key, with or without ``rabbitdelay_``, as the error names it.
            value: The value.

        Raises:
            InvalidSetting: The value is invalid.
        """
        kind = setting_types(cls)[key.removeprefix(PREFIX)]
        if not kind.accepts(value):
            raise exceptions.InvalidSetting(key, kind.shown(value), f"takes {kind.takes}")
        return value

    def check_beside(self, groups: Groups) -> None:
        """Refuse settings that conflict with other groups; called once all groups are read.

        Args:
            groups: The groups that have a key in the configuration, keyed by their classes.

        Raises:
            InvalidSetting: A setting needs another setting.
        """

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.shown.items())
        return f"{type(self).__name__}({shown})"

    @property
    def shown(self) -> dict[str, object]:
        """The settings by their names, without secrets and passwords."""
        types = setting_types(type(self))
        return {name: kind.shown(getattr(self, name)) for name, kind in types.items()}


#: The groups of settings, keyed by their classes.
Groups: TypeAlias = Mapping[type[SettingsGroup], SettingsGroup]


_TYPES: Final[dict[type[SettingsGroup], dict[str, SettingType]]] = {}


def setting_types(group: type[SettingsGroup]) -> dict[str, SettingType]:
    """Return the type of each setting of a group, keyed by the setting's name."""
    if group not in _TYPES:
        hints = typing.get_type_hints(group, include_extras=True)
        types = {each.name: _type_of(hints[each.name], each.default) for each in fields(group)}
        _TYPES[group] = types
    return _TYPES[group]


def _type_of(hint: Any, default: object) -> SettingType:
    """Return the type of a setting by its annotation; if its default is None, None is valid."""
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


#: The longest prefix that leaves every name on the broker below AMQP's 255 bytes.
MAX_PREFIX_LENGTH: Final = 100

#: The upper limit of RabbitMQ's setting ``max_message_size``, in bytes.
MAX_MESSAGE_BYTES: Final = 512 * 2**20

#: With 32 shards, the layout "clock" exceeds the 5,000 queues above which RabbitMQ's documentation
#: advises caution.
MAX_SHARDS: Final = 32

#: The characters of a prefix. Names that begin with "amq." are reserved for the broker.
_VALID_PREFIX: Final = re.compile(rf"(?!amq\.)[A-Za-z0-9_:.-]{{1,{MAX_PREFIX_LENGTH}}}")

Declare: TypeAlias = Literal["auto", "never"]


def _is_list_of_words(value: object) -> TypeGuard[Sequence[str]]:
    return isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)


def _is_layout(value: object) -> bool:
    if isinstance(value, Mapping):
        return value.get("name") in (*NAMED, "custom")
    return value in NAMED if isinstance(value, str) else isinstance(value, list | tuple | Layout)


def _is_signing_key(value: Any) -> bool:
    try:
        SigningKeys(value)
    except (exceptions.InvalidSigningKey, TypeError):
        return False
    return True


_NAMES: Final = SettingType("a list of names, with the wildcards * and ?", _is_list_of_words)

NAME_PREFIX: Final = SettingType(
    f"1 to {MAX_PREFIX_LENGTH} letters, digits, '-', '_', ':' and '.'; 'amq.' is the broker's own",
    lambda value: isinstance(value, str) and _VALID_PREFIX.fullmatch(value) is not None,
)

_LAYOUT: Final = SettingType(
    '"clock", "binary", "geometric", a mapping with one of these or "custom" as its '
    '"name", a list of (name, base, unit), or a celery_rabbitdelay.kombu.Layout',
    _is_layout,
)

_TICK: Final = SettingType(
    "a positive number of seconds, in whole milliseconds, at most 366 days",
    lambda value: SECONDS.accepts(value) and (Fraction(repr(value)) * 1000).denominator == 1,
)


def _known_modules() -> tuple[str, ...]:
    # Applications may have added services since this file was imported.
    return CHECK_IN, DISTRIBUTE, *additions.services


#: The modules that are installed.
_INSTALLED_MODULES: Final = tuple(
    name
    for name in _known_modules()
    if all(additions.exists(each) for each in additions.entries if name in each.services)
)

_MODULES: Final = SettingType(
    f"a list of any of {', '.join(_known_modules())}, and of the services of your own additions",
    lambda value: _is_list_of_words(value) and set(value) <= set(_known_modules()),
)

_SIGNING_KEY: Final = SettingType(
    f"a string of at least {MIN_KEY_BYTES} bytes, or a list of such strings, of which the first "
    "signs: python -c 'import secrets; print(secrets.token_hex(32))' generates a key",
    _is_signing_key,
    hidden,
)

_RETRY_FOR: Final = SettingType(
    "0 or a positive number of seconds, at most 366 days",
    lambda value: is_number(value) and 0 <= value <= A_YEAR,
)


@dataclass(frozen=True, repr=False)
class Settings(SettingsGroup):
    """The kernel's settings; each attribute is the key without ``rabbitdelay_``.

    Raises:
        InvalidSetting: A value is invalid.
    """

    #: The first part of every name on the broker.
    prefix: Annotated[str, NAME_PREFIX] = "rabbitdelay"

    #: The levels: "clock", "binary" or "geometric"; your own levels as a list of (name, base,
    #: unit), highest first; a mapping of the layout's ``name``, also "custom", and its options, for
    #: example ``{"name": "geometric", "factor": 60, "levels": 5}``; or a ``Layout``.
    layout: Annotated[object, _LAYOUT] = "clock"

    #: The resolution in seconds. Not used with a list of levels, whose tick is its lowest unit, or
    #: with a ``Layout``, which has its own tick.
    tick: Annotated[float, _TICK] = 0.1

    #: The type of the levels' queues: "quorum", or "classic", which can lose a message that is
    #: moving to the next level when the broker fails.
    queue_type: QueueType = "quorum"

    #: Whether tasks with ``countdown`` or ``eta`` wait in the levels too; tasks with ``delay`` and
    #: rows of ``send_many`` always wait there.
    takeover: bool = True

    #: "auto": the first process that needs the topology declares it. "never": operators declare it,
    #: and bind every destination to the delivery exchange.
    declare: Declare = "auto"

    #: The number of queues for each digit. On a cluster, their leaders are on different nodes, so
    #: that more tasks can come due in a second.
    shards: Annotated[int, whole_number(MAX_SHARDS)] = 1

    #: Seconds until a missing confirm becomes an error.
    confirm_timeout: Annotated[float, SECONDS] = 30.0

    #: A task that arrives more than this many seconds early, by the clock of its worker, goes back
    #: into the levels for the remaining time.
    early_tolerance: Annotated[float, SECONDS] = 1.0

    #: The maximum number of unconfirmed messages that a module, or ``send_many``, has in flight.
    max_unconfirmed: Annotated[int, whole_number(MAX_PREFETCH)] = 1000

    #: The modules that workers serve. A producer whose setting lacks a module refuses tasks that
    #: only this module could deliver.
    modules: Annotated[Sequence[str], _MODULES] = _INSTALLED_MODULES

    #: The names of the queues and exchanges that check-in may reach; ``*`` stands for any
    #: characters, ``?`` for any one character. None: the names that the application knows.
    checkin_allowed: Annotated[Sequence[str] | None, _NAMES] = None

    #: Whether to trust the clients of check-in as much as producers. Their tasks may then have any
    #: serializer and compression, and callbacks, a chain, a chord and ``reply_to``, which reach
    #: destinations beyond ``checkin_allowed``.
    checkin_trusted: bool = False

    #: The names of the queues and exchanges that distribution may reach, with ``*`` and ``?``.
    #: None: the queues that the application knows or that are bound to the levels, and every
    #: exchange except the exchanges of Celery, the broker and the levels.
    distribution_allowed: Annotated[Sequence[str] | None, _NAMES] = None

    #: The key with which destination and due time are signed, or a list of keys: the first key
    #: signs, and all keys verify. None: nothing is signed.
    signing_key: Annotated[str | Sequence[str] | None, _SIGNING_KEY] = None

    #: Whether distribution refuses messages without a valid signature, if there is a key.
    signing_required: bool = True

    #: The maximum bytes of a message's body, even inside an envelope, that check-in and
    #: distribution accept. A larger message is undeliverable.
    max_message_bytes: Annotated[int, whole_number(MAX_MESSAGE_BYTES)] = DEFAULT_MAX_MESSAGE_BYTES

    #: Seconds for which a due message is retried, with growing pauses, if its destination refuses
    #: it. After that time, or at once with 0, the message is undeliverable.
    retry_for: Annotated[float, _RETRY_FOR] = 86_400.0

    #: The names of queues that may refuse a message, with ``*`` and ``?``. Their messages go
    #: through distribution, so that a refusal holds up no other messages. Queues that the
    #: application declares with a bound and ``reject-publish`` need not be named.
    may_refuse: Annotated[Sequence[str], _NAMES] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self.topology  # noqa: B018 - built here so that a wrong layout fails at the start
        except (exceptions.InvalidLayout, TypeError, ValueError) as wrong:
            raise exceptions.InvalidSetting(
                f"{PREFIX}layout", self.layout, f"{wrong} (rabbitdelay_tick = {self.tick!r})"
            ) from wrong

    @cached_property
    def topology(self) -> Topology:
        """The topology that the settings describe."""
        layout = _layout_of(self.layout, self.tick)
        return Topology(self.prefix, layout, self.queue_type, self.shards)

    @cached_property
    def signing_keys(self) -> SigningKeys | None:
        """The keys that sign and verify messages; None without a signing key."""
        return None if self.signing_key is None else SigningKeys(self.signing_key)

    @property
    def for_producer(self) -> dict[str, Any]:
        """The arguments of a :class:`~celery_rabbitdelay.kombu.DelayedProducer`."""
        return {
            "topology": self.topology,
            "timeout": self.confirm_timeout,
            "may_declare": self.declare == "auto",
            "modules": self.modules,
            "may_refuse": self.may_refuse,
            "signing_keys": self.signing_keys,
            "max_message_bytes": self.max_message_bytes,
        }

    def check_delay(self, due: Due) -> None:
        """Refuse a delay that is too long for the modules that workers serve.

        Raises:
            DelayTooLong: The delay is above the layout's capacity, and ``modules`` lacks check-in.
            InvalidDelay: The delay is longer than 100 years.
        """
        if CHECK_IN not in self.modules:
            self.topology.layout.check_capacity(due.delay_ms)
        check_max_delay(due)


def _layout_of(value: Any, tick: float) -> Layout:
    """Return the layout that a setting describes; the layout may have its own tick."""
    if isinstance(value, Layout):
        return value
    if isinstance(value, list | tuple):
        return custom(value)
    options = {"name": value} if isinstance(value, str) else dict(value)
    name = options.pop("name")
    if name == "custom":
        return custom(**options)
    return NAMED[name](**{"tick": tick, **options})


def read_settings(configuration: Mapping[str, object], namespace: str | None = None) -> Groups:
    """Read and check this package's keys in a Celery configuration.

    Args:
        configuration: ``app.conf``, or any mapping.
        namespace: ``app.namespace``: the prefix of Celery's keys in Django's settings.

    Returns:
        The kernel's group, and the groups of the additions that have a key in the configuration.

    Raises:
        InvalidSetting: A key is unknown, has an invalid value, or is written so that Celery ignores
            it.
    """
    keys = _keys(configuration, namespace)
    by_group: dict[type[SettingsGroup], dict[str, str]] = {Settings: {}}
    for name, key in keys.items():
        by_group.setdefault(_group(name, key), {})[name] = key
    groups = {}
    for group, own in by_group.items():
        try:
            groups[group] = group(**{name: configuration[key] for name, key in own.items()})
        except exceptions.InvalidSetting as wrong:
            # The key as the user wrote it, such as CELERY_RABBITDELAY_TICK in Django's settings.
            key = keys.get(wrong.key.removeprefix(PREFIX), wrong.key)
            raise exceptions.InvalidSetting(key, wrong.value, wrong.takes) from wrong.__cause__
    for each in groups.values():
        each.check_beside(groups)
    return groups


def _group(name: str, key: str) -> type[SettingsGroup]:
    """Return the group of a setting."""
    if name in setting_types(Settings):
        return Settings
    try:
        group: type[SettingsGroup] = additions.load(additions.settings[name])
    except exceptions.AdditionMissing as missing:
        raise exceptions.InvalidSetting(key, HIDDEN, str(missing)) from missing
    return group


def _keys(configuration: Mapping[str, object], namespace: str | None) -> dict[str, str]:
    """Return the key of each setting in a configuration, keyed by the setting's name."""
    known = (*setting_types(Settings), *additions.settings)
    starts = PREFIX, _key_of("", namespace)
    # Upper-case keys, which Celery ignores. Users write them because Celery's own keys were
    # upper-case before 4.0, and Django's keys are. With a namespace, CELERY_ may be another
    # application's namespace.
    ignored = PREFIX.upper(), PREFIX.upper() if namespace else f"CELERY_{PREFIX.upper()}"
    read: dict[str, str] = {}
    unread: dict[str | None, str] = {}
    for key in configuration:
        name = _name_in(key, starts)
        if name is None:
            unread[_name_in(key, ignored)] = key
        elif name in known:
            read[name] = key
        else:
            # The value is hidden, since it may be a secret under a misspelt key.
            close = get_close_matches(name, known, 1)
            meant = f"the settings are {', '.join(PREFIX + each for each in known)}"
            if close:
                meant = f"did you mean {_key_of(close[0], namespace)}?"
            raise exceptions.InvalidSetting(key, HIDDEN, f"no such setting; {meant}")
    for name in known:
        if name in unread and name not in read:
            key = unread[name]
            kind = setting_types(_group(name, key))[name]
            reason = f"Celery does not read this key; use {_key_of(name, namespace)}"
            raise exceptions.InvalidSetting(key, kind.shown(configuration[key]), reason)
    return read


def _name_in(key: object, starts: tuple[str, ...]) -> str | None:
    """Return the name of the setting that a key sets; None for a key of another package."""
    if not isinstance(key, str):
        return None
    return next((key.removeprefix(each).lower() for each in starts if key.startswith(each)), None)


def _key_of(name: str, namespace: str | None) -> str:
    """Return the key of a setting; as in Celery, in capitals if the namespace is in capitals."""
    if not namespace:
        return PREFIX + name
    key = f"{namespace.rstrip('_')}_{PREFIX}{name}"
    return key.upper() if namespace.isupper() else key.lower()
