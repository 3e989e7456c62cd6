"""The additions to the kernel, by name: the kernel imports an addition on first use.

An addition is a folder of this package, or a module of an application. An :class:`Entry` lists its
settings, options, methods, bootsteps and commands; an :class:`.Addition` has the methods that the
kernel calls. If a folder was deleted, its settings, options, methods and commands raise
:class:`.AdditionMissing`. Applications import these names from :mod:`celery_rabbitdelay.additions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

from celery_rabbitdelay.exceptions import AdditionMissing


class Entry(NamedTuple):
    """The parts of an addition. Classes are written ``"module:Class"``.

    Attributes:
        name: The name of the addition, which is the name of its folder.
        hooks: A subclass of :class:`.Addition`, whose methods the kernel calls.
        switch: The setting that turns the hooks on; empty if they are always on.
        group: A :class:`.SettingsGroup`, for the addition's settings.
        settings: The names of these settings, without ``rabbitdelay_``.
        options: The names of its options of ``apply_async``.
        methods: The attributes that it adds to ``app.rabbitdelay``, keyed by class. An
            instance is made for each application, with its :class:`.Delays`.
        consumer_steps: Bootsteps of a worker's consumer.
        worker_steps: Bootsteps of a worker.
        worker_options: Options of ``celery worker``, with their help; its bootsteps get them.
        services: Services that a worker runs alongside the modules, keyed by their names in
            ``rabbitdelay_modules``: functions with the arguments of
            :func:`.worker.bootsteps.module_service`.
        commands: Commands of ``celery rabbitdelay``, by module. Each is a click command or group in
            that module, named with ``_`` in place of ``-``.
    """

    name: str
    hooks: str = ""
    switch: str = ""
    group: str = ""
    settings: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    methods: Mapping[str, tuple[str, ...]] = {}
    consumer_steps: tuple[str, ...] = ()
    worker_steps: tuple[str, ...] = ()
    worker_options: Mapping[str, str] = {}
    services: Mapping[str, str] = {}
    commands: Mapping[str, tuple[str, ...]] = {}


_PACKAGE: Final = "celery_rabbitdelay"

_REGISTRY: Final = f"{_PACKAGE}.registry"

#: The additions of this package that the kernel has to know by name. The additions for Spark and
#: for tests are missing, because users import them.
BUILT_IN: Final = (
    Entry(
        "registry",
        hooks=f"{_REGISTRY}.addition:RegistryAddition",
        switch="registry_url",
        group=f"{_REGISTRY}.application:RegistrySettings",
        settings=(
            "registry_url",
            "registry_options",
            "registry_prefix",
            "registry_down",
            "registry_keep",
            "track",
        ),
        options=("key", "job", "once", "track"),
        methods={
            f"{_REGISTRY}.waiting:Waiting": (
                *("registry", "has_registry", "cancel", "cancel_pending", "cancel_batches"),
                *("is_waiting", "postpone", "show", "pending", "count"),
                *("pending_since", "open_job", "commit_job", "abort_job", "job"),
                *("pause", "resume", "paused"),
            ),
        },
        consumer_steps=(f"{_REGISTRY}.bootsteps:DecideOnArrival",),
        worker_steps=(f"{_REGISTRY}.bootsteps:ReturnPaused",),
        commands={
            f"{_REGISTRY}.commands": (
                *("cancel", "job", "pause", "pending", "postpone", "resume"),
                "show",
            )
        },
    ),
    Entry(
        "schedules",
        hooks=f"{_PACKAGE}.schedules.addition:SchedulesAddition",
        switch="registry_url",
        group=f"{_PACKAGE}.schedules.addition:ScheduleSettings",
        settings=("beat",),
        methods={f"{_PACKAGE}.schedules.addition:HasSchedules": ("schedules",)},
        consumer_steps=(f"{_PACKAGE}.schedules.arrivals:ScheduleStep",),
        commands={f"{_PACKAGE}.schedules.command": ("schedules",)},
    ),
    Entry(
        "operations",
        worker_steps=(f"{_PACKAGE}.operations.worker_status:CountArrivals",),
        commands={
            f"{_PACKAGE}.operations.move_commands": ("adopt", "migrate", "transfer"),
            f"{_PACKAGE}.operations.undeliverable_commands": ("undeliverable",),
            **{
                f"{_PACKAGE}.operations.{name}": (name,)
                for name in ("capacity", "delete", "export", "permissions", "status", "verify")
            },
        },
    ),
    Entry(
        "metrics",
        group=f"{_PACKAGE}.metrics.settings:MetricsSettings",
        settings=("metrics_port",),
        worker_steps=(f"{_PACKAGE}.metrics.bootstep:ServeMetrics",),
        worker_options={
            "--rabbitdelay-metrics-port": "The port, or the address and port, on which the worker "
            "serves metrics to Prometheus. Overrides the setting rabbitdelay_metrics_port. Empty "
            "for none.",
        },
        methods={f"{_PACKAGE}.metrics.collector:HasMetrics": ("metrics",)},
        services={"probe": f"{_PACKAGE}.metrics.probe:probe_service"},
    ),
    Entry(
        "web",
        group=f"{_PACKAGE}.web.settings:WebSettings",
        settings=("web",),
        commands={f"{_PACKAGE}.web.command": ("web",)},
    ),
)

#: All additions, of this package and of applications.
entries: Final[list[Entry]] = []

#: The groups of settings, keyed by the names of the settings.
settings: Final[dict[str, str]] = {}

#: The hooks of additions, keyed by the names of their options.
options: Final[dict[str, str]] = {}

#: The modules of all commands, by name. At first, these are the kernel's commands.
commands: Final[dict[str, str]] = {
    name: f"{_PACKAGE}.command.levels:{name}" for name in ("declare", "route")
}

#: The classes that have the attributes of ``app.rabbitdelay``, keyed by the attributes' names.
methods: Final[dict[str, str]] = {}

#: The functions that make the services of a worker, keyed by the names of the services.
services: Final[dict[str, str]] = {}


def add(entry: Entry) -> None:
    """Register an addition, for applications that are made afterwards.

    Args:
        entry: The parts of the addition.

    Raises:
        ValueError: Another addition has a setting, an option, an attribute, a command or a service
            of the same name.
    """
    attributes = {name: where for where, names in entry.methods.items() for name in names}
    modules = {name: module for module, names in entry.commands.items() for name in names}
    parts: tuple[tuple[dict[str, str], Mapping[str, str]], ...] = (
        (settings, dict.fromkeys(entry.settings, entry.group)),
        (options, dict.fromkeys(entry.options, entry.hooks)),
        (methods, attributes),
        (services, entry.services),
        (commands, {name: f"{modules[name]}:{name.replace('-', '_')}" for name in modules}),
    )
    for known, own in parts:
        for name in own:
            if name in known:
                raise ValueError(f"another addition uses the name {name!r} already")
    entries.append(entry)
    for known, own in parts:
        known.update(own)


def exists(entry: Entry) -> bool:
    """Return whether an addition can be imported; its folder may have been deleted."""
    is_ours = any(entry is each for each in BUILT_IN)
    return not is_ours or find_spec(f"{_PACKAGE}.{entry.name}") is not None


def load(where: str) -> Any:
    """Import an object that an entry names.

    Args:
        where: The object, written ``"module:name"``.

    Raises:
        AdditionMissing: The folder of the addition does not exist.
    """
    module, _, name = where.partition(":")
    package = module.removeprefix(f"{_PACKAGE}.").partition(".")[0]
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != f"{_PACKAGE}.{package}":
            raise
        raise AdditionMissing(where, package) from error


for _each in BUILT_IN:
    add(_each)
