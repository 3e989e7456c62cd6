"""Signatures with a delay, in groups, chains, chords and callbacks.

Celery passes an option that it does not know, such as ``delay``, through its canvas unchanged.
But an unchanged ``delay`` fails in two places. The options of a whole chord reach its body as well,
which would wait a second time. And a callback, or the remaining tasks of a chain, travel in another
task's message: the worker that sends them may not know ``delay``, and JSON cannot express a
timedelta.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Generic, Self, TypeVar, Unpack

from celery.canvas import Signature
from celery.result import AsyncResult

from celery_rabbitdelay.app.celery_internals import copied_as
from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.app.options import (
    DelayOptions,
    Options,
    OwnOptions,
    own_options,
    without_stamps,
)
from celery_rabbitdelay.app.seams import checked_added_options
from celery_rabbitdelay.exceptions import UnknownOption
from celery_rabbitdelay.levels.delay import milliseconds, plain

ResultT_co = TypeVar("ResultT_co", covariant=True)

#: The options for the time at which a task may start. The last given option wins.
TIMES: Final = ("delay", "countdown", "eta")

#: All options that may be a datetime or a timedelta.
LENGTHS_AND_INSTANTS: Final = ("delay", "eta", "expires", "tolerance")

#: The options of a task that are its callbacks.
LINKS: Final = ("link", "link_error")

#: The options of a task that are signatures, or lists of them.
SIGNATURE_OPTIONS: Final = (*LINKS, "chain", "chord")

#: For each type of canvas, the arguments that are signatures, or lists of them.
PARTS: Final[Mapping[str | None, tuple[str, ...]]] = {
    "group": ("tasks",),
    "chain": ("tasks",),
    "chord": ("header", "body"),
}

#: Why a ``key`` is refused: only the newest of the tasks with this key would run.
OF_ONE_TASK: Final = (
    "does not apply to a group, a chain or a chord: give it to one of their tasks, as in "
    "task.s(...).set(key=...)"
)

#: An option that tells ``send_task`` that the signature has already called
#: :func:`restore_body_delay`.
BODY_DELAY_IS_RESTORED: Final = "rabbitdelay_body_delay_is_restored"


class DelayingSignature(Signature, Generic[ResultT_co]):
    """A signature of one task that distinguishes its own delay from its chord's.

    Attributes:
        former: The options of the signature that this one was cloned from. Celery clones the body
            of a chord before it adds the options of the whole chord.
    """

    former: Options = MappingProxyType({})

    def set(self, immutable: bool | None = None, **options: Unpack[DelayOptions]) -> Self:
        """Set options; setting one of delay, countdown, eta removes the other two."""
        given = self._checked(options)
        _drop_other_times(self.options, given)
        super().set(immutable, **given)
        return self

    def clone(self, args: Any = None, kwargs: Any = None, **options: Unpack[DelayOptions]) -> Self:
        """Return a copy; setting one of delay, countdown, eta removes the other two."""
        given = _plain_times(options)
        copy = self.of(super().clone(args, kwargs, **given))
        _drop_other_times(copy.options, given)
        copy.former = dict(self.options)
        return copy

    partial = clone

    def apply_async(  # type: ignore[override]  # it takes no option that Celery would drop
        self,
        args: Any = None,
        kwargs: Any = None,
        route_name: str | None = None,
        **options: Unpack[DelayOptions],
    ) -> AsyncResult[ResultT_co]:
        """Send the task, as in Celery; a time in the options replaces the signature's own time.

        Raises:
            UnknownOption: A ``key`` was given to a whole group, chain or chord.
        """
        given = self._checked(options)
        own, _ = without_stamps(given)
        # Only a chord or a chain that contains this signature passes these options.
        is_part = given.get("chord") is not None or bool(given.get("chain"))
        if own.get("key") is not None and (is_part or "group_id" in self.options):
            raise UnknownOption("key", own["key"], OF_ONE_TASK)
        if is_part:
            given = restore_body_delay(given, own.get("delay"))
            given[BODY_DELAY_IS_RESTORED] = True
        sent = self
        if _has_time(self.options) and _has_time(given):
            sent = self.clone()
            _drop_other_times(sent.options, given)
        return super(DelayingSignature, sent).apply_async(args, kwargs, route_name, **given)

    def _checked(self, options: Options) -> OwnOptions:
        """Check options for this signature; refuse an option with the name of a stamp."""
        own, _ = without_stamps(options)
        for name in self.options.get("stamped_headers") or ():
            if name in own_options() and own.get(name) is not None:
                raise UnknownOption(name, own[name], "the signature has a stamp with this name")
        return _plain_times(options)

    @classmethod
    def of(cls, signature: Any) -> Self:
        """Copy a plain signature as an object of this class."""
        copy = copied_as(cls, signature)
        copy["options"] = _plain_times(copy.options)
        return copy


def _plain_times(options: Mapping[str, object]) -> OwnOptions:
    """Return options with plain times, which Celery can copy and JSON can express."""
    stamps: Any = options.get("stamped_headers") or ()
    times: OwnOptions = {
        name: plain(options[name], name)
        for name in LENGTHS_AND_INSTANTS
        if name in options and name not in stamps
    }
    return {**options, **times}


def _has_time(options: Options) -> bool:
    own, _ = without_stamps(options)
    return any(own.get(time) is not None for time in TIMES)


def _drop_other_times(own: OwnOptions, given: Options) -> None:
    if _has_time(given):
        stamps = own.get("stamped_headers") or ()
        for time in TIMES:
            if given.get(time) is None and time not in stamps:
                own.pop(time, None)


def restore_body_delay(options: Options, delay: Any) -> OwnOptions:
    """Return options in which the body of a chord has its own delay, not the whole chord's.

    Celery has copied the options of the whole chord to the body, and copies them to each task of
    the header, so the two delays are equal. The body gets its own delay back. If the body is not a
    :class:`DelayingSignature` (a group, chain or chord, or a signature made from a task name only),
    its own delay is unknown, and the body loses it.

    Args:
        options: The options with which a task of the chord's header is sent; they are not changed.
        delay: The delay in these options; None without a delay.
    """
    changed, delay = dict(options), plain(delay, "delay")
    if options.get("chord") is not None:
        body = _restore_within(options["chord"], delay)
        if "delay" in body["options"] and plain(body["options"]["delay"], "delay") == delay:
            del body["options"]["delay"]
            body["options"].update(_own_times(options["chord"], delay))
        changed["chord"] = body
    if options.get("chain"):
        changed["chain"] = [_restore_within(task, delay) for task in options["chain"]]
    return changed


def _restore_within(signature: Any, delay: Any) -> OwnOptions:
    """Restore the body's delay in all chords that have a task of the signature in their header."""
    changed = _with_parts(signature, lambda part: _restore_within(part, delay))
    return {**changed, "options": restore_body_delay(signature["options"], delay)}


def _own_times(body: Any, delay: Any) -> Options:
    former: Options = getattr(body, "former", {})
    linked = any(body["options"].get(link) != former.get(link) for link in LINKS)
    if former.get("delay") == delay and linked:
        # link() has cloned the body after the body got the chord's delay: ``former`` holds that
        # delay, and the body's own is lost.
        return {}
    return {time: former[time] for time in TIMES if time in former}


def _with_parts(signature: Any, change: Callable[[Any], Any]) -> OwnOptions:
    """Return a copy of a signature with each of its parts changed."""
    kwargs = signature.get("kwargs") or {}
    parts = PARTS.get(signature.get("subtask_type"), ())
    return {
        **signature,
        "kwargs": {**kwargs, **{part: _each(kwargs[part], change) for part in parts}},
    }


def _each(signatures: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(signatures, list | tuple):
        return [change(each) for each in signatures]
    return change(signatures) if isinstance(signatures, Mapping) else signatures


def translate_delays(options: Options, delays: Delays) -> OwnOptions:
    """Convert the delays of nested signatures to a form that any worker understands.

    This form is ``countdown``, which every Celery knows, or ``delay`` in seconds if a countdown
    would not wait in the levels.

    Args:
        options: The options of a task that is about to be sent; they are not changed.
        delays: The application's delay levels.

    Raises:
        InvalidDelay: The delay of a nested signature is not finite.
        InvalidDelayType: The delay of a nested signature is not a length of time.
        UnknownOption: An addition refuses an option of a nested signature.
    """
    translate = partial(_translate, delays=delays)
    nested = {
        name: _each(options[name], translate) for name in SIGNATURE_OPTIONS if options.get(name)
    }
    return {**options, **nested}


def _translate(signature: Options, delays: Delays) -> OwnOptions:
    options, stamps = without_stamps(signature.get("options") or {})
    checked_added_options(options, delays)
    options = _plain_times(translate_delays(options, delays))
    if isinstance(tolerance := options.get("tolerance"), timedelta):
        options["tolerance"] = tolerance.total_seconds()
    delay = options.pop("delay", None)
    translated = _with_parts(signature, partial(_translate, delays=delays))
    translated["options"] = {**options, **stamps}
    if delay is None:
        return translated
    word = "countdown" if delays.settings.takeover else "delay"
    return _add_delay(translated, word, milliseconds(delay) / 1000)


def _add_delay(signature: Options, word: str, seconds: float) -> OwnOptions:
    if signature.get("subtask_type") == "chord":
        # Every task of the header gets the delay: before 5.7, Celery does not pass it on.
        kwargs = signature["kwargs"]
        # If the header is a group, the group's own options are lost.
        header = kwargs["header"]
        tasks = header["kwargs"]["tasks"] if isinstance(header, Mapping) else header
        delayed = _each(tasks, lambda task: _add_delay(task, word, seconds))
        return {**signature, "kwargs": {**kwargs, "header": delayed}}
    options = {**signature["options"]}
    _drop_other_times(options, {word: seconds})
    return {**signature, "options": {**options, word: seconds}}
