"""The ``rabbitdelay_*`` keys of the Celery configuration, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias

from celery_rabbitdelay.app.setting_keys import PREFIX, key_of, name_in_capitals, name_of
from celery_rabbitdelay.app.setting_kinds import (
    CLIENT_OPTIONS,
    FLAG,
    INTERFACE,
    LAYOUT,
    LONG_SECONDS,
    MAX_PORT,
    NAME_PREFIX,
    NAMES,
    REDIS_URL,
    SECONDS,
    SECONDS_OR_ZERO,
    SIGNING_KEY,
    TICK,
    layout_of,
    list_of,
    one_of,
    optional,
    whole_number,
)
from celery_rabbitdelay.exceptions import InvalidLayout, InvalidSetting
from celery_rabbitdelay.levels.delay import Due, check_max_delay
from celery_rabbitdelay.levels.entities import QueueType
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.bounds import DEFAULT_MAX_DELAY, Bounds
from celery_rabbitdelay.modules.deliveries import MAX_PREFETCH
from celery_rabbitdelay.publishing.message import DEFAULT_MAX_MESSAGE_BYTES
from celery_rabbitdelay.publishing.shown_url import HIDDEN
from celery_rabbitdelay.publishing.signature import SigningKeys

#: The largest message that any RabbitMQ takes (``max_message_size``).
MAX_MESSAGE_BYTES: Final = 512 * 2**20

#: With 32, the clock exceeds the 5,000 queues above which RabbitMQ's documentation advises caution.
MAX_SHARDS: Final = 32

#: The most copies of a decision that a call can wait for.
MAX_COPIES: Final = 100

Declare: TypeAlias = Literal["auto", "never"]
RegistryDown: TypeAlias = Literal["hold", "run"]
Track: TypeAlias = Literal["none", "all"]

#: The modules around the levels that a worker can serve.
MODULES: Final = ("check-in", "distribution")

_MODULES: Final = list_of(MODULES)
_PORT: Final = optional(whole_number(MAX_PORT))

#: Settings that are only of use with a registry, and their values without one.
NEEDS_REGISTRY: Final = {"track": "none", "once": False}


#: What each setting takes.
_KINDS: Final = {
    "prefix": NAME_PREFIX,
    "layout": LAYOUT,
    "tick": TICK,
    "queue_type": one_of(QueueType),
    "takeover": FLAG,
    "declare": one_of(Declare),
    "shards": whole_number(MAX_SHARDS),
    "confirm_timeout": SECONDS,
    "early": SECONDS,
    "window": whole_number(MAX_PREFETCH),
    "modules": _MODULES,
    "checkin_allowed": optional(NAMES),
    "distribution_allowed": optional(NAMES),
    "signing_key": optional(SIGNING_KEY),
    "signing_required": FLAG,
    "max_message_bytes": whole_number(MAX_MESSAGE_BYTES),
    "max_delay": LONG_SECONDS,
    "redelivery": SECONDS_OR_ZERO,
    "may_refuse": NAMES,
    "registry_url": optional(REDIS_URL),
    "registry_options": CLIENT_OPTIONS,
    "registry_prefix": optional(NAME_PREFIX),
    "registry_timeout": SECONDS,
    "registry_down": one_of(RegistryDown),
    "registry_keep": LONG_SECONDS,
    "registry_durability": optional(whole_number(MAX_COPIES)),
    "track": one_of(Track),
    "once": FLAG,
    "metrics_port": _PORT,
    "metrics_host": INTERFACE,
    "metrics_pending": FLAG,
}


@dataclass(frozen=True, repr=False)
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
        distribution_allowed: The names of the queues and exchanges that distribution may reach, in
            the same way. None: the queues that the application knows or that are bound to the
            levels, and every exchange but those of Celery, of the broker and of the levels.
        signing_key: The key with which destination and due time are signed, or a list of keys: the
            first one signs, and all verify. None: nothing is signed.
        signing_required: Whether, with a key, distribution refuses what has no valid signature.
        max_message_bytes: The largest message, in bytes of its body, that check-in and distribution
            take; also of the messages in an envelope. A larger one is undeliverable.
        max_delay: The longest delay, in seconds. Producers and check-in refuse a longer one.
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
        registry_down: What becomes of a task with a key or a job, or that is tracked or runs once,
            if Redis does not answer when it is due: "hold", it goes back into the levels for some
            seconds; "run", it runs. All other tasks run.
        registry_keep: Seconds for which the registry remembers what was decided about a task after
            the task is due. A task with such an option that arrives later is undeliverable.
        registry_durability: How many copies a cancel, a commit or an abort has to have before the
            call returns: the server's append-only file (Redis 7.2, Valkey) is one, and so is each
            of its replicas. None: Redis has it in memory, and a fail-over may lose it.
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
    distribution_allowed: Sequence[str] | None = None
    signing_key: str | Sequence[str] | None = field(default=None, repr=False)
    signing_required: bool = True
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    max_delay: float = DEFAULT_MAX_DELAY
    redelivery: float = 86_400.0
    may_refuse: Sequence[str] = ()
    registry_url: str | None = None
    registry_options: Mapping[str, Any] = field(default_factory=dict)
    registry_prefix: str | None = None
    registry_timeout: float = 0.5
    registry_down: RegistryDown = "hold"
    registry_keep: float = 2_592_000.0
    registry_durability: int | None = None
    track: Track = "none"
    once: bool = False
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    metrics_pending: bool = True

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
            name = name_of(key, namespace)
            if name is None:
                unread[name_in_capitals(key, namespace)] = key
                continue
            if name not in known:
                keys = ", ".join(PREFIX + name for name in known)
                # Without its value: the key may be meant to be one of a secret.
                raise InvalidSetting(key, HIDDEN, f"no such key; there are {keys}")
            found[name] = configuration[key]
            as_written[PREFIX + name] = key
        for name in known:
            if name in unread and name not in found:
                reason = f"the setting is not read from this key, write {key_of(name, namespace)}"
                key = unread[name]
                raise InvalidSetting(key, _KINDS[name].shown(configuration[key]), reason)
        try:
            return cls(**found)
        except InvalidSetting as wrong:
            # As the user has written it, for example CELERY_RABBITDELAY_TICK in Django's settings.
            key = as_written.get(wrong.key, wrong.key)
            raise InvalidSetting(key, wrong.value, wrong.takes) from wrong.__cause__

    def __post_init__(self) -> None:
        for setting in fields(self):
            kind, value = _KINDS[setting.name], getattr(self, setting.name)
            if not kind.accepts(value):
                raise InvalidSetting(PREFIX + setting.name, kind.shown(value), kind.takes)
        for name, without in NEEDS_REGISTRY.items():
            value = getattr(self, name)
            if value != without and self.registry_url is None:
                raise InvalidSetting(PREFIX + name, value, f"{value} needs {PREFIX}registry_url")
        try:
            self.topology  # noqa: B018 - built here so that a wrong layout fails at the start
        except (InvalidLayout, TypeError, ValueError) as wrong:
            raise InvalidSetting(
                f"{PREFIX}layout", self.layout, f"{wrong} (rabbitdelay_tick = {self.tick!r})"
            ) from wrong

    def __repr__(self) -> str:
        shown = (f"{name}={kind.shown(getattr(self, name))!r}" for name, kind in _KINDS.items())
        return f"Settings({', '.join(shown)})"

    @cached_property
    def topology(self) -> Topology:
        """The topology that the settings describe."""
        layout = layout_of(self.layout, self.tick)
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
            "max_delay": self.max_delay,
            "max_message_bytes": self.max_message_bytes,
        }

    @property
    def bounds(self) -> Bounds:
        """What a message may cost that a module takes."""
        return Bounds(self.max_message_bytes, self.max_delay)

    def check_delay(self, due: Due) -> None:
        """Refuse a delay that is too long for what workers serve.

        Raises:
            DelayTooLong: It is above the layout's capacity, and ``modules`` lacks check-in.
            InvalidDelay: It is longer than ``max_delay``.
        """
        if "check-in" not in self.modules:
            self.topology.layout.check_capacity(due.delay_ms)
        check_max_delay(due, self.max_delay)


def checked_modules(value: Any) -> tuple[str, ...]:
    """Return which modules a worker is to serve, from its command line.

    Raises:
        InvalidSetting: One of them does not exist.
    """
    modules = value
    if isinstance(value, str):
        modules = [word for word in map(str.strip, value.split(",")) if word]
    if not _MODULES.accepts(modules):
        raise InvalidSetting(f"{PREFIX}modules", value, _MODULES.takes)
    return tuple(modules)


def checked_port(value: str) -> int | None:
    """Return the port of the metrics, from a worker's command line; None for none.

    Raises:
        InvalidSetting: It is no port.
    """
    port = int(value) if value.isascii() and value.isdigit() else value or None
    if not _PORT.accepts(port):
        raise InvalidSetting(f"{PREFIX}metrics_port", value, _PORT.takes)
    assert not isinstance(port, str)
    return port


def checked_seconds(key: str, value: Any) -> float:
    """Return a timeout that one call gives.

    Raises:
        InvalidSetting: It is not a positive number of seconds.
    """
    if not SECONDS.accepts(value):
        raise InvalidSetting(key, value, SECONDS.takes)
    return float(value)
