"""Signatures with a delay, in groups, chains, chords and callbacks.

Celery passes an option that it does not know, such as ``delay``, through its canvas unchanged. That
goes wrong in two places. The options of a whole chord reach its body as well, which would wait a
second time. And a signature that travels in another task's message, as a callback or as the rest of
a chain, may be sent by a worker that has never heard of ``delay``; nor has JSON a timedelta.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from celery.canvas import Signature

from celery_rabbitdelay.levels.delay import milliseconds

__all__ = ["CHORD_IS_SETTLED", "NESTED", "DelayingSignature", "portable", "settled"]

#: The options that say when a task may start. Of these, the one that is given last holds.
TIMES: Final = ("delay", "countdown", "eta")

#: The options of a task that are its callbacks.
LINKS: Final = ("link", "link_error")

#: The options of a task that are signatures, or lists of them.
NESTED: Final = (*LINKS, "chain", "chord")

#: Which arguments of a signature of several tasks are signatures, or lists of them.
PARTS: Final[Mapping[str | None, tuple[str, ...]]] = {
    "group": ("tasks",),
    "chain": ("tasks",),
    "chord": ("header", "body"),
}

#: An option by which a signature tells ``send_task`` that it has called :func:`settled`.
CHORD_IS_SETTLED: Final = "rabbitdelay_chord_is_settled"


class DelayingSignature(Signature):
    """A signature of one task, which can tell its own delay from that of a chord around it.

    Attributes:
        former: The options of the signature that this one was cloned from. Celery clones the body
            of a chord before it gives it the options of the whole.
    """

    former: Mapping[str, Any] = {}
    _type: Any

    def set(self, immutable: bool | None = None, **options: Any) -> DelayingSignature:
        """Set options, as in Celery; a new time replaces what was set of the other times."""
        _drop_other_times(self.options, options)
        super().set(immutable, **options)
        return self

    def clone(self, args: Any = None, kwargs: Any = None, **options: Any) -> DelayingSignature:
        """Return a copy, as in Celery; a new time replaces the other ones."""
        copy = DelayingSignature.of(super().clone(args, kwargs, **options))
        _drop_other_times(copy.options, options)
        copy.former = dict(self.options)
        return copy

    partial = clone

    def apply_async(
        self, args: Any = None, kwargs: Any = None, route_name: str | None = None, **options: Any
    ) -> Any:
        """Send the task, as in Celery; a time that is given here replaces the signature's own."""
        # Only a chord or a chain around this signature gives these by call.
        if options.get("chord") is not None or options.get("chain"):
            options = settled(options, options.get("delay"))
            options[CHORD_IS_SETTLED] = True
        sent = self
        if _says_when(self.options) and _says_when(options):
            sent = self.clone()
            _drop_other_times(sent.options, options)
        return super(DelayingSignature, sent).apply_async(args, kwargs, route_name, **options)

    @classmethod
    def of(cls, signature: Any) -> DelayingSignature:
        """Return one with everything that a plain signature has."""
        ours: DelayingSignature = cls(signature, app=signature._app)
        ours._type = signature._type
        return ours


def _says_when(options: Mapping[str, Any]) -> bool:
    return any(options.get(time) is not None for time in TIMES)


def _drop_other_times(own: dict[str, Any], given: Mapping[str, Any]) -> None:
    if _says_when(given):
        for time in TIMES:
            if given.get(time) is None:
                own.pop(time, None)


def settled(options: Mapping[str, Any], delay: Any) -> dict[str, Any]:
    """Return options in which the delay of a whole chord is not the delay of the chord's body.

    Celery has given the options of the whole to the body, and gives them to each task of the header
    as it is sent: so the two delays are the same. The body gets its own one back. Only a plain
    signature, of several tasks or by name, does not know it any more, and loses it.

    Args:
        options: Those with which a task of the header is sent; they stay as they are.
        delay: The delay among them; None where there is none.
    """
    changed = dict(options)
    if options.get("chord") is not None:
        body = _settled_within(options["chord"], delay)
        if "delay" in body["options"] and body["options"]["delay"] == delay:
            del body["options"]["delay"]
            body["options"].update(_own_times(options["chord"], delay))
        changed["chord"] = body
    if options.get("chain"):
        changed["chain"] = [_settled_within(task, delay) for task in options["chain"]]
    return changed


def _settled_within(signature: Any, delay: Any) -> dict[str, Any]:
    """Settle the chords around the tasks of a signature, which is in the header of each of them."""
    changed = _with_parts(signature, lambda part: _settled_within(part, delay))
    return {**changed, "options": settled(signature["options"], delay)}


def _own_times(body: Any, delay: Any) -> Mapping[str, Any]:
    former: Mapping[str, Any] = getattr(body, "former", {})
    linked = any(body["options"].get(link) != former.get(link) for link in LINKS)
    if former.get("delay") == delay and linked:
        # Cloned once more to be linked, when it had the delay of the whole already.
        return {}
    return {time: former[time] for time in TIMES if time in former}


def _with_parts(signature: Any, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a copy of a signature in which those that it is made of are changed."""
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


def portable(options: Mapping[str, Any], word: str) -> dict[str, Any]:
    """Return options whose nested signatures any worker understands.

    Args:
        options: The options of a task that is about to be sent; they stay as they are.
        word: The option that says the delay of a nested signature, in seconds: ``countdown``, which
            every Celery knows, or ``delay`` where a countdown would not wait in the levels.

    Raises:
        InvalidDelay: The delay of a nested signature is not finite.
        InvalidDelayType: It is not a length of time.
    """
    nested = {
        name: _each(options[name], lambda part: _translated(part, word))
        for name in NESTED
        if options.get(name)
    }
    return {**options, **nested}


def _translated(signature: Mapping[str, Any], word: str) -> dict[str, Any]:
    options = portable(signature.get("options") or {}, word)
    delay = options.pop("delay", None)
    translated = _with_parts(signature, lambda part: _translated(part, word))
    translated["options"] = options
    if delay is None:
        return translated
    return _delayed(translated, word, milliseconds(delay) / 1000)


def _delayed(signature: Mapping[str, Any], word: str, seconds: float) -> dict[str, Any]:
    if signature.get("subtask_type") == "chord":
        # Not left to the chord: before 5.7, Celery does not delay its header.
        kwargs = signature["kwargs"]
        # A header that is a group loses the group's own options.
        header = kwargs["header"]
        tasks = header["kwargs"]["tasks"] if isinstance(header, Mapping) else header
        delayed = _each(tasks, lambda task: _delayed(task, word, seconds))
        return {**signature, "kwargs": {**kwargs, "header": delayed}}
    options = {**signature["options"]}
    _drop_other_times(options, {word: seconds})
    return {**signature, "options": {**options, word: seconds}}
