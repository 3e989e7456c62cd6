"""The ``rabbitdelay_*`` keys of the Celery configuration: what they mean and what they take."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from celery_rabbitdelay.app.setting_types import (
    A_YEAR,
    PREFIX,
    SECONDS,
    SettingsGroup,
    SettingType,
    hidden,
    is_number,
    read_settings,
    whole_number,
)
from celery_rabbitdelay.exceptions import InvalidLayout, InvalidSetting, InvalidSigningKey
from celery_rabbitdelay.levels.delay import Due, check_max_delay
from celery_rabbitdelay.levels.layout import NAMED, Layout, custom
from celery_rabbitdelay.levels.topology import CHECK_IN, MODULES, QueueType, Topology
from celery_rabbitdelay.modules.deliveries import MAX_PREFETCH
from celery_rabbitdelay.publishing.message import DEFAULT_MAX_MESSAGE_BYTES
from celery_rabbitdelay.publishing.signature import MIN_KEY_BYTES, SigningKeys

#: The longest prefix that leaves every name on the broker below AMQP's 255 bytes.
MAX_PREFIX_LENGTH: Final = 100

#: The largest message that any RabbitMQ takes (``max_message_size``).
MAX_MESSAGE_BYTES: Final = 512 * 2**20

#: With 32, the clock exceeds the 5,000 queues above which RabbitMQ's documentation advises caution.
MAX_SHARDS: Final = 32

#: The characters of a prefix. Names that begin with "amq." are reserved for the broker.
_VALID_PREFIX: Final = re.compile(rf"(?!amq\.)[A-Za-z0-9_:.-]{{1,{MAX_PREFIX_LENGTH}}}")

Declare: TypeAlias = Literal["auto", "never"]


def _is_list_of_words(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)


def _is_prefix(value: object) -> bool:
    return isinstance(value, str) and _VALID_PREFIX.fullmatch(value) is not None


def _is_layout(value: object) -> bool:
    if isinstance(value, Mapping):
        return value.get("name") in (*NAMED, "custom")
    return value in NAMED if isinstance(value, str) else isinstance(value, list | tuple | Layout)


def _is_tick(value: Any) -> bool:
    return SECONDS.accepts(value) and (Fraction(repr(value)) * 1000).denominator == 1


def _is_signing_key(value: Any) -> bool:
    try:
        SigningKeys(value)
    except (InvalidSigningKey, TypeError):
        return False
    return True


_NAMES: Final = SettingType("a list of names in which * and ? may stand", _is_list_of_words)

NAME_PREFIX: Final = SettingType(
    f"1 to {MAX_PREFIX_LENGTH} letters, digits, '-', '_', ':' and '.'; 'amq.' is the broker's own",
    _is_prefix,
)

_LAYOUT: Final = SettingType(
    '"clock", "binary", "geometric", a mapping with one of these or "custom" as its '
    '"name", a list of (name, base, unit), or a celery_rabbitdelay.kombu.Layout',
    _is_layout,
)

_TICK: Final = SettingType(
    "a positive number of seconds, in whole milliseconds, at most 366 days", _is_tick
)

_MODULES: Final = SettingType(
    f"a list of any of {', '.join(MODULES)}",
    lambda value: _is_list_of_words(value) and set(value) <= set(MODULES),
)

_SIGNING_KEY: Final = SettingType(
    f"a text of at least {MIN_KEY_BYTES} bytes, or a list of such texts, of which the first "
    "signs: python -c 'import secrets; print(secrets.token_hex(32))' makes one",
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
        InvalidSetting: A value that a setting does not take.
    """

    #: The first part of every name on the broker.
    prefix: Annotated[str, NAME_PREFIX] = "rabbitdelay"

    #: The levels: "clock", "binary" or "geometric"; a list of (name, base, unit), highest first,
    #: for levels of your own; a mapping of the layout's ``name``, also "custom", and its options,
    #: for example ``{"name": "geometric", "factor": 60, "levels": 5}``; or a ``Layout``.
    layout: Annotated[Any, _LAYOUT] = "clock"

    #: The resolution in seconds. A list of levels and a ``Layout`` bring their own, and this
    #: setting is not used: the tick of a list is its lowest unit.
    tick: Annotated[float, _TICK] = 0.1

    #: The type of the levels' queues: "quorum", or "classic", which can lose a message that goes
    #: from one level to the next while the broker fails.
    queue_type: QueueType = "quorum"

    #: Whether ``countdown`` and ``eta`` wait in the levels too; ``delay`` and rows of ``send_many``
    #: always do.
    takeover: bool = True

    #: "auto": whoever first needs the topology declares it. "never": operators do, and bind every
    #: destination to the delivery exchange as well.
    declare: Declare = "auto"

    #: How many queues each digit has. Each has a leader of its own, on another node of a cluster,
    #: so that more can come due in a second.
    shards: Annotated[int, whole_number(MAX_SHARDS)] = 1

    #: Seconds until a missing confirm becomes an error.
    confirm_timeout: Annotated[float, SECONDS] = 30.0

    #: Seconds. A task that leaves the levels earlier than that, by the clock of the worker that
    #: receives it, goes back into them for the rest.
    early_tolerance: Annotated[float, SECONDS] = 1.0

    #: How many messages a module, or ``send_many``, has in flight, unconfirmed, at the most.
    max_unconfirmed: Annotated[int, whole_number(MAX_PREFETCH)] = 1000

    #: Which modules the workers serve. A producer whose setting lacks one refuses what only that
    #: one could deliver.
    modules: Annotated[Sequence[str], _MODULES] = MODULES

    #: The names of the queues and exchanges that check-in may reach; ``*`` and ``?`` stand for any
    #: characters and for one. None: those that the application knows.
    checkin_allowed: Annotated[Sequence[str] | None, _NAMES] = None

    #: Whether the clients of check-in are trusted as producers are: their tasks may then have
    #: callbacks, a chain, a chord and ``reply_to``, which reach more than ``checkin_allowed``
    #: names, and any serializer and compression.
    checkin_trusted: bool = False

    #: The names of the queues and exchanges that distribution may reach, in the same way. None: the
    #: queues that the application knows or that are bound to the levels, and every exchange but
    #: those of Celery, of the broker and of the levels.
    distribution_allowed: Annotated[Sequence[str] | None, _NAMES] = None

    #: The key with which destination and due time are signed, or a list of keys: the first one
    #: signs, and all verify. None: nothing is signed.
    signing_key: Annotated[str | Sequence[str] | None, _SIGNING_KEY] = None

    #: Whether, with a key, distribution refuses what has no valid signature.
    signing_required: bool = True

    #: The largest message, in bytes of its body, that check-in and distribution take; also of the
    #: messages in an envelope. A larger one is undeliverable.
    max_message_bytes: Annotated[int, whole_number(MAX_MESSAGE_BYTES)] = DEFAULT_MAX_MESSAGE_BYTES

    #: Seconds during which a due message that its destination does not take is tried again, with
    #: growing pauses. After that, or at once with 0, it is undeliverable.
    retry_for: Annotated[float, _RETRY_FOR] = 86_400.0

    #: The names of queues that may refuse a message, with ``*`` and ``?``. Their messages go
    #: through distribution, so that a refusal holds up no others. Queues that the application
    #: declares with a bound and ``reject-publish`` are known to.
    may_refuse: Annotated[Sequence[str], _NAMES] = ()

    @classmethod
    def of(cls, configuration: Mapping[str, Any], namespace: str | None = None) -> Self:
        """Read and check our keys in a Celery configuration; return the kernel's own settings.

        Args:
            configuration: ``app.conf``, or any mapping.
            namespace: ``app.namespace``: what Django's settings put before each key.

        Raises:
            InvalidSetting: As :func:`.read_settings`.
        """
        own = read_settings(cls, configuration, namespace)[cls]
        assert isinstance(own, cls)
        return own

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self.topology  # noqa: B018 - built here so that a wrong layout fails at the start
        except (InvalidLayout, TypeError, ValueError) as wrong:
            raise InvalidSetting(
                f"{PREFIX}layout", self.layout, f"{wrong} (rabbitdelay_tick = {self.tick!r})"
            ) from wrong

    @cached_property
    def topology(self) -> Topology:
        """The topology that the settings describe."""
        layout = _layout_of(self.layout, self.tick)
        return Topology(self.prefix, layout, self.queue_type, self.shards)

    @cached_property
    def signing_keys(self) -> SigningKeys | None:
        """What signs and verifies messages; None without a key."""
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
        """Refuse a delay that is too long for what workers serve.

        Raises:
            DelayTooLong: It is above the layout's capacity, and ``modules`` lacks check-in.
            InvalidDelay: It is longer than 100 years.
        """
        if CHECK_IN not in self.modules:
            self.topology.layout.check_capacity(due.delay_ms)
        check_max_delay(due)


def _layout_of(value: Any, tick: float) -> Layout:
    """Return the layout that a setting describes; it may bring its own tick."""
    if isinstance(value, Layout):
        return value
    if isinstance(value, list | tuple):
        return custom(value)
    options = {"name": value} if isinstance(value, str) else dict(value)
    name = options.pop("name")
    if name == "custom":
        return custom(**options)
    return NAMED[name](**{"tick": tick, **options})
