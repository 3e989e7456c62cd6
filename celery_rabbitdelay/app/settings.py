"""The ``rabbitdelay_*`` keys of the Celery configuration, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Final, Literal, TypeAlias, TypeGuard, get_args

from celery_rabbitdelay.exceptions import InvalidLayout, InvalidSetting
from celery_rabbitdelay.levels.entities import QueueType
from celery_rabbitdelay.levels.layout import Layout, binary, clock, custom, geometric
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.consumer import MAX_PREFETCH

__all__ = ["MODULES", "Settings", "checked_modules", "checked_port", "checked_seconds"]

#: The beginning of all our keys.
PREFIX: Final = "rabbitdelay_"

#: The longest prefix that leaves every name on the broker below AMQP's 255 bytes.
MAX_PREFIX_LENGTH: Final = 100

#: Seconds; no tick and no timeout is longer.
A_YEAR: Final = 366 * 86_400

#: With 32, the clock exceeds the 5,000 queues above which RabbitMQ's documentation advises caution.
MAX_SHARDS: Final = 32

#: The highest TCP port.
MAX_PORT: Final = 65_535

Declare: TypeAlias = Literal["auto", "never"]
RegistryDown: TypeAlias = Literal["hold", "run"]
Track: TypeAlias = Literal["none", "all"]

#: The modules around the levels that a worker can serve.
MODULES: Final = ("check-in", "distribution")

_LAYOUTS: Final[dict[str, Callable[..., Layout]]] = {
    "clock": clock,
    "binary": binary,
    "geometric": geometric,
}


@dataclass(frozen=True)
class Settings:
    """Our part of a Celery configuration; each attribute is the key without ``rabbitdelay_``.

    Attributes:
        prefix: The first part of every name on the broker.
        layout: The levels: "clock", "binary" or "geometric"; a list of (name, base, unit), highest
            first, for levels of your own; a mapping of the layout's ``name``, also "custom", and
            its options, for example ``{"name": "geometric", "factor": 60, "levels": 5}`` or
            ``{"name": "clock", "zeros": "skip"}``; or a
            :class:`~celery_rabbitdelay.kombu.Layout`.
        tick: The resolution in seconds. A list of levels and a ``Layout`` bring their own, and this
            setting is not used: the tick of a list is its lowest unit.
        queue_type: The type of the levels' queues: "quorum", or "classic", which can lose a message
            that goes from one level to the next while the broker fails.
        shards: How many queues each digit has. Each has a leader of its own, on another node of a
            cluster, so that more can come due in a second.
        takeover: Whether ``countdown`` and ``eta`` wait in the levels too; ``delay`` and rows of
            ``send_many`` always do.
        declare: "auto": whoever first needs the topology declares it. "never": operators do, and
            bind every destination to the delivery exchange as well.
        confirm_timeout: Seconds until a missing confirm becomes an error.
        early: Seconds. A task that leaves the levels earlier than that, by the clock of the worker
            that receives it, goes back into them for the rest.
        window: How many messages a module, or ``send_many``, has in flight, unconfirmed, at the
            most.
        modules: Which modules the workers serve, of "check-in" and "distribution". A producer whose
            setting lacks one refuses what only that one could deliver.
        checkin_allowed: The names of the queues and exchanges that check-in may reach; ``*`` and
            ``?`` stand for any characters and for one. None: those that the application knows.
        redelivery: Seconds during which a due message that its destination does not take is tried
            again, with growing pauses. After that, or at once with 0, it is undeliverable.
        may_refuse: The names of queues that may refuse a message, with ``*`` and ``?``. Their
            messages go through distribution, so that a refusal holds up no others. Queues that the
            application declares with a bound and ``reject-publish`` are known to.
        registry_url: The URL of the Redis that the registry is kept in; None for no registry.
            ``redis://``, ``rediss://``, ``unix://`` and ``sentinel://`` are written as for Celery's
            result backend; ``redis+cluster://host:6379`` names any server of a cluster.
        registry_options: Further arguments of redis-py's client; for Sentinel also ``master_name``
            and ``sentinel_kwargs``.
        registry_prefix: The first part of the registry's keys; None for ``prefix``. Set it to the
            former prefix before tasks are migrated to another one.
        registry_timeout: Seconds for connecting to Redis, and for each of its answers.
        registry_down: What becomes of a task that is due while Redis does not answer: "hold", it
            goes back into the levels for some seconds; "run", it runs.
        track: "all": every delayed task is listed in the registry while it waits; "none": those
            that are sent with ``track=True``, or whose task has ``track = True``.
        once: Whether only the first message with a task's id runs; see the option ``once``.
        metrics_port: The TCP port on which a worker serves its metrics to Prometheus; None for
            none.
        metrics_host: The address on which it serves them.
        metrics_pending: Whether the metrics tell what waits in the levels, which the worker asks
            the broker when it is asked.
    """

    prefix: str = "rabbitdelay"
    layout: Any = "clock"
    tick: float = 0.1
    queue_type: QueueType = "quorum"
    takeover: bool = True
    declare: Declare = "auto"
    shards: int = 1
    confirm_timeout: float = 30.0
    early: float = 1.0
    window: int = 1000
    modules: Sequence[str] = MODULES
    checkin_allowed: Sequence[str] | None = None
    redelivery: float = 86_400.0
    may_refuse: Sequence[str] = ()
    registry_url: str | None = None
    registry_options: Mapping[str, Any] = field(default_factory=dict)
    registry_prefix: str | None = None
    registry_timeout: float = 0.5
    registry_down: RegistryDown = "hold"
    track: Track = "none"
    once: bool = False
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    metrics_pending: bool = True

    TAKES: ClassVar[Mapping[str, str]] = {
        "prefix": (
            f"takes 1 to {MAX_PREFIX_LENGTH} letters, digits, '-', '_', ':' and '.'; 'amq.' is "
            "the broker's own"
        ),
        "layout": (
            'takes "clock", "binary", "geometric", a mapping with one of these or "custom" as its '
            '"name", a list of (name, base, unit), or a celery_rabbitdelay.kombu.Layout'
        ),
        "tick": "takes a positive number of seconds, in whole milliseconds, at most 366 days",
        "queue_type": f"takes one of {', '.join(get_args(QueueType))}",
        "shards": f"takes a whole number from 1 to {MAX_SHARDS}",
        "takeover": "takes True or False",
        "declare": f"takes one of {', '.join(get_args(Declare))}",
        "confirm_timeout": "takes a positive number of seconds, at most 366 days",
        "early": "takes a positive number of seconds, at most 366 days",
        "window": f"takes a whole number from 1 to {MAX_PREFETCH}",
        "modules": f"takes a list of any of {', '.join(MODULES)}",
        "checkin_allowed": "takes None, or a list of names in which * and ? may stand",
        "redelivery": "takes 0 or a positive number of seconds, at most 366 days",
        "may_refuse": "takes a list of names in which * and ? may stand",
        "registry_url": "takes None, or the URL of a Redis",
        "registry_options": "takes a mapping of arguments of redis-py's client",
        "registry_prefix": f"takes None, or 1 to {MAX_PREFIX_LENGTH} characters as the prefix",
        "registry_timeout": "takes a positive number of seconds, at most 366 days",
        "registry_down": f"takes one of {', '.join(get_args(RegistryDown))}",
        "track": f"takes one of {', '.join(get_args(Track))}; all needs rabbitdelay_registry_url",
        "once": "takes True or False; True needs rabbitdelay_registry_url",
        "metrics_port": f"takes None, or a whole number from 1 to {MAX_PORT}",
        "metrics_host": "takes the address of an interface of this machine, for example 0.0.0.0",
        "metrics_pending": "takes True or False",
    }

    @classmethod
    def of(cls, configuration: Mapping[str, Any], namespace: str | None = None) -> Settings:
        """Read and check our keys in a Celery configuration.

        Args:
            configuration: ``app.conf``, or any mapping.
            namespace: ``app.namespace``: what Django's settings put before each key.

        Raises:
            InvalidSetting: A key that does not exist, one that Celery does not read, or a value
                that it does not take.
        """
        known = [setting.name for setting in fields(cls)]
        found = {}
        unread = {}
        as_written: dict[str, str] = {}
        for key in configuration:
            name = _name(key, namespace)
            if name is None:
                unread[_name_in_capitals(key, namespace)] = key
                continue
            if name not in known:
                keys = ", ".join(PREFIX + name for name in known)
                raise InvalidSetting(key, configuration[key], f"no such key; there are {keys}")
            found[name] = configuration[key]
            as_written[PREFIX + name] = key
        for name in known:
            if name in unread and name not in found:
                reason = f"the setting is not read from this key, write {_key(name, namespace)}"
                raise InvalidSetting(unread[name], configuration[unread[name]], reason)
        try:
            return cls(**found)
        except InvalidSetting as wrong:
            # As the user has written it, for example CELERY_RABBITDELAY_TICK in Django's settings.
            key = as_written.get(wrong.key, wrong.key)
            raise InvalidSetting(key, wrong.value, wrong.takes) from wrong.__cause__

    def __post_init__(self) -> None:
        for name, takes in self.TAKES.items():
            value = getattr(self, name)
            if not getattr(self, f"_takes_{name}")(value):
                raise InvalidSetting(PREFIX + name, value, takes)
        try:
            self.topology  # noqa: B018 - built here so that a wrong layout fails at the start
        except (InvalidLayout, TypeError, ValueError) as wrong:
            raise InvalidSetting(
                f"{PREFIX}layout", self.layout, f"{wrong} (rabbitdelay_tick = {self.tick!r})"
            ) from wrong

    @cached_property
    def topology(self) -> Topology:
        """The topology that the settings describe."""
        return Topology(self.prefix, self._layout(), self.queue_type, self.shards)

    @property
    def for_producer(self) -> dict[str, Any]:
        """The arguments of a :class:`~celery_rabbitdelay.kombu.DelayedProducer`."""
        return {
            "topology": self.topology,
            "timeout": self.confirm_timeout,
            "may_declare": self.declare == "auto",
            "modules": self.modules,
            "may_refuse": self.may_refuse,
        }

    def _layout(self) -> Layout:
        if isinstance(self.layout, Layout):
            return self.layout
        if isinstance(self.layout, str):
            return _LAYOUTS[self.layout](tick=self.tick)
        if isinstance(self.layout, Mapping):
            options = dict(self.layout)
            name = options.pop("name")
            if name == "custom":
                return custom(**options)
            return _LAYOUTS[name](**{"tick": self.tick, **options})
        return custom(self.layout)

    @staticmethod
    def _takes_prefix(value: object) -> bool:
        return (
            isinstance(value, str)
            and 0 < len(value) <= MAX_PREFIX_LENGTH
            and value.isascii()
            and all(character.isalnum() or character in "-_:." for character in value)
            and not value.startswith("amq.")
        )

    @staticmethod
    def _takes_layout(value: object) -> bool:
        if isinstance(value, Mapping):
            return value.get("name") in (*_LAYOUTS, "custom")
        return (isinstance(value, str) and value in _LAYOUTS) or isinstance(
            value, list | tuple | Layout
        )

    @staticmethod
    def _takes_tick(value: object) -> bool:
        return _is_positive(value) and (Fraction(repr(value)) * 1000).denominator == 1

    @staticmethod
    def _takes_queue_type(value: object) -> bool:
        return value in get_args(QueueType)

    @staticmethod
    def _takes_shards(value: object) -> bool:
        return _is_whole(value, MAX_SHARDS)

    @staticmethod
    def _takes_takeover(value: object) -> bool:
        return isinstance(value, bool)

    @staticmethod
    def _takes_declare(value: object) -> bool:
        return value in get_args(Declare)

    @staticmethod
    def _takes_confirm_timeout(value: object) -> bool:
        return _is_positive(value)

    @staticmethod
    def _takes_early(value: object) -> bool:
        return _is_positive(value)

    @staticmethod
    def _takes_window(value: object) -> bool:
        return _is_whole(value, MAX_PREFETCH)

    @staticmethod
    def _takes_modules(value: object) -> bool:
        return _is_list_of_words(value) and set(value) <= set(MODULES)

    @staticmethod
    def _takes_checkin_allowed(value: object) -> bool:
        return value is None or _is_list_of_words(value)

    @staticmethod
    def _takes_redelivery(value: object) -> bool:
        return _is_positive(value) or (value == 0 and not isinstance(value, bool))

    @staticmethod
    def _takes_may_refuse(value: object) -> bool:
        return _is_list_of_words(value)

    @staticmethod
    def _takes_registry_url(value: object) -> bool:
        return value is None or (isinstance(value, str) and "://" in value)

    @staticmethod
    def _takes_registry_options(value: object) -> bool:
        return isinstance(value, Mapping)

    def _takes_registry_prefix(self, value: object) -> bool:
        return value is None or self._takes_prefix(value)

    @staticmethod
    def _takes_registry_timeout(value: object) -> bool:
        return _is_positive(value)

    @staticmethod
    def _takes_registry_down(value: object) -> bool:
        return value in get_args(RegistryDown)

    def _takes_track(self, value: object) -> bool:
        return value == "none" or (value == "all" and self.registry_url is not None)

    def _takes_once(self, value: object) -> bool:
        return value is False or (value is True and self.registry_url is not None)

    @staticmethod
    def _takes_metrics_port(value: object) -> bool:
        return value is None or _is_whole(value, MAX_PORT)

    @staticmethod
    def _takes_metrics_host(value: object) -> bool:
        return isinstance(value, str) and value != ""

    @staticmethod
    def _takes_metrics_pending(value: object) -> bool:
        return isinstance(value, bool)


def checked_modules(value: Any) -> tuple[str, ...]:
    """Return which modules a worker is to serve, from its command line.

    Raises:
        InvalidSetting: One of them does not exist.
    """
    modules = value
    if isinstance(value, str):
        modules = [word for word in map(str.strip, value.split(",")) if word]
    if not _is_list_of_words(modules) or not set(modules) <= set(MODULES):
        raise InvalidSetting(f"{PREFIX}modules", value, Settings.TAKES["modules"])
    return tuple(modules)


def checked_port(value: str) -> int | None:
    """Return the port of the metrics, from a worker's command line; None for none.

    Raises:
        InvalidSetting: It is no port.
    """
    port = int(value) if value.isascii() and value.isdigit() else value or None
    if not Settings._takes_metrics_port(port):
        raise InvalidSetting(f"{PREFIX}metrics_port", value, Settings.TAKES["metrics_port"])
    assert not isinstance(port, str)
    return port


def checked_seconds(key: str, value: Any) -> float:
    """Return a timeout that one call gives.

    Raises:
        InvalidSetting: It is not a positive number of seconds.
    """
    if not _is_positive(value):
        raise InvalidSetting(key, value, Settings.TAKES["confirm_timeout"])
    return float(value)


def _name(key: object, namespace: str | None) -> str | None:
    """Return the setting that is read from a configuration key, None if it is not ours."""
    if not isinstance(key, str):
        return None
    if key.startswith(PREFIX):
        return key.removeprefix(PREFIX)
    start = _key("", namespace)
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


def _key(name: str, namespace: str | None) -> str:
    """Return the key of a setting. It is in capitals where the namespace is, as in Celery."""
    if not namespace:
        return PREFIX + name
    key = f"{namespace.rstrip('_')}_{PREFIX}{name}"
    return key.upper() if namespace.isupper() else key.lower()


def _is_list_of_words(value: object) -> TypeGuard[Sequence[str]]:
    return isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)


def _is_whole(value: object, maximum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= maximum


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= A_YEAR
