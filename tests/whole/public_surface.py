# ruff: noqa: T201  # a program at the terminal prints
"""Describe the public surface: what applications, their settings and their messages rely on.

``python -m tests.whole.public_surface`` writes it to ``public_surface.txt``. Classes, functions and
members are those of docs/reference/api.md.
"""

import inspect
import re
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final

import click
from celery.utils.dispatch import Signal

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app import additions, options, signals
from celery_rabbitdelay.app.settings import PREFIX, Settings
from celery_rabbitdelay.command.group import rabbitdelay
from celery_rabbitdelay.kombu import Topology, binary, clock, geometric
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.metrics.instruments import INSTRUMENTS
from celery_rabbitdelay.spark import options as spark_options
from celery_rabbitdelay.testing import plugin

FILE: Final = Path(__file__).with_suffix(".txt")
API: Final = Path(__file__).parents[2] / "docs" / "reference" / "api.md"

#: A class, an error or a function on that page, with its options.
_DIRECTIVE: Final = re.compile(r"^\.\. auto[cef]\w+:: (\S+)\n((?: .*\n)*)", re.M)


def _signature(function: Any) -> str:
    # Annotations are texts, which Python quotes.
    text = re.sub(r" at 0x\w+", "", str(inspect.signature(function)))
    text = re.sub(r"ForwardRef\(('[^']*')[^)]*\)", r"\1", text)
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)
    return text.removesuffix(" -> None") if inspect.isclass(function) else text


def _constructor(cls: type) -> str:
    # Celery's own constructors differ from version to version.
    owner = next(each for each in cls.__mro__ if {"__init__", "__new__"} & vars(each).keys())
    is_ours = owner.__module__.startswith("celery_rabbitdelay") and not issubclass(cls, Enum)
    return _signature(cls) if is_ours else ""


def _members(cls: type, directive: str) -> Iterator[str]:
    listed = re.search(r" :members:([^:]*)", directive)
    names = re.findall(r"\w+", listed[1]) if listed else []
    if listed and not names:
        owners = cls.__mro__ if ":inherited-members:" in directive else (cls,)
        ours = [each for each in owners if each.__module__.startswith("celery_rabbitdelay")]
        names = [name for each in ours for name in vars(each) if name[0] != "_"]
    for name in sorted(set(names)):
        owner = cls if hasattr(cls, name) else additions.load(additions.methods[name])
        static, value = inspect.getattr_static(owner, name), getattr(owner, name)
        getter = getattr(static, "fget", None) or getattr(static, "func", None)
        shown = _signature(value) if callable(value) else f" = {value!r}"
        yield f"    .{name}{_signature(getter).replace('(self) ->', ':') if getter else shown}"


def documented() -> Iterator[tuple[str, str, Any]]:
    """Yield the classes and functions: the name, Sphinx's directive, and the object."""
    for where, directive in sorted(_DIRECTIVE.findall(API.read_text())):
        # With a colon: there is a module ``spark.grouped`` too.
        yield where, directive, resolve_name(":".join(where.rsplit(".", 1)))


def _names() -> Iterator[str]:
    for where, directive, found in documented():
        yield f"{where}{_constructor(found) if inspect.isclass(found) else _signature(found)}"
        if inspect.isclass(found):
            yield from _members(found, directive)
    for error in (vars(exceptions)[name] for name in exceptions.__all__):
        bases = ", ".join(each.__name__ for each in error.__bases__)
        yield f"{error.__name__}{_constructor(error)}: {bases}"
    named = (name for name, each in vars(signals).items() if isinstance(each, Signal))
    yield from (f"celery_rabbitdelay.signals.{name}" for name in sorted(named))


def _settings() -> Iterator[str]:
    for group in (Settings, *map(additions.load, dict.fromkeys(additions.settings.values()))):
        for name, kind in typing.get_type_hints(group).items():
            shown = re.sub(r"[a-z.]+\.(?=[A-Z])", "", inspect.formatannotation(kind))
            yield f"{PREFIX}{name}: {shown} = {getattr(group, name)!r}"


def _wire() -> Iterator[str]:
    texts = {each for each in vars(headers).values() if isinstance(each, str)}
    for name in sorted(each for each in texts if re.match(f"{headers.OWN_PREFIX}.", each)):
        yield f"header {name}{' (of the registry)' if name in headers.REGISTRY else ''}"
    yield f"header {headers.X_DELAY}"
    yield f"envelope {headers.ENVELOPE}, latest version of a message {headers.MESSAGE_VERSION}"
    topology = Topology()
    for each in topology.all_exchanges:
        yield f"exchange {each.name}: {each.type} {each.arguments}"
    # Of the queues of a level, the first and the last.
    inner = {each.name for level in topology.level_queues.values() for each in level[1:-1]}
    for queue in (*topology.queues, topology.probe):
        if queue.name not in inner:
            yield f"queue {queue.name}: {queue.queue_arguments}"
    for binding in (*topology.bindings, topology.probe_binding):
        if binding.target not in inner:
            yield f"binding {binding.source} -> {binding.target}: {binding.pattern}"
    others = [Topology("p", each, "classic", 2) for each in (clock(0.01), binary(), geometric())]
    yield from (f"fingerprint {each.identity.fingerprint}" for each in (topology, *others))


def _commands(group: click.Group, path: str) -> Iterator[str]:
    for name in group.list_commands(context := click.Context(group)):
        command = group.get_command(context, name)
        assert command is not None
        yield " ".join((path, name, *sorted(map(_parameter, command.params))))
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}")


def _parameter(each: click.Parameter) -> str:
    names = "/".join((*each.opts, *each.secondary_opts))
    words = "|".join(map(str, getattr(each.type, "choices", [each.type.name])))
    kind = "" if getattr(each, "is_flag", False) else f" {words}"
    shown = f"{names}{kind}{'...' if each.multiple or each.nargs != 1 else ''}"
    return shown if each.required else f"[{shown}]"


def surface() -> str:
    """Return the whole surface."""
    fixtures = re.findall(r"^@pytest\.fixture.*\ndef ([a-z]\w+)", inspect.getsource(plugin), re.M)
    metrics = (f"{each.metric} {each.kind} {each.labels} {each.buckets}" for each in INSTRUMENTS)
    spark = (
        f"{cls.__name__}: {name} = {cls._field_defaults[attribute]!r}"
        for cls, named in spark_options._OPTIONS.items()
        for name, (attribute, _) in named.items()
    )
    of_worker = (each for entry in additions.BUILT_IN for each in entry.worker_options)
    parts = {
        "Classes, functions, errors and signals": _names(),
        "Options of a send": (*options.OWN_OPTIONS, *additions.options),
        "Settings": _settings(),
        "Messages, exchanges and queues": _wire(),
        "Metrics": metrics,
        "Commands": _commands(rabbitdelay, "rabbitdelay"),
        "Options of workers": of_worker,
        "Options of Spark": spark,
        "Fixtures of pytest, and options --rabbitdelay-*": (*fixtures, *plugin._OPTIONS),
    }
    return "\n".join(
        line for title, lines in parts.items() for line in (f"## {title}", "", *lines, "")
    )


if __name__ == "__main__":
    FILE.write_text(surface())
    print(FILE)
