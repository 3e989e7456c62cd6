"""What the ``rabbitdelay_*`` settings take: in words, for errors, and as a check. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final, NamedTuple, TypeGuard, cast, get_args

from celery_rabbitdelay.exceptions import InvalidSigningKey
from celery_rabbitdelay.levels.delay import MAX_DUE_MS
from celery_rabbitdelay.levels.layout import Layout, binary, clock, custom, geometric
from celery_rabbitdelay.publishing.shown_url import HIDDEN, without_password
from celery_rabbitdelay.publishing.signature import MIN_KEY_BYTES, SigningKeys

#: The longest prefix that leaves every name on the broker below AMQP's 255 bytes.
MAX_PREFIX_LENGTH: Final = 100

#: Seconds; no tick and no timeout is longer.
A_YEAR: Final = 366 * 86_400

#: The highest TCP port.
MAX_PORT: Final = 65_535

_LAYOUTS: Final[dict[str, Callable[..., Layout]]] = {
    "clock": clock,
    "binary": binary,
    "geometric": geometric,
}


class Kind(NamedTuple):
    """What a setting takes.

    Attributes:
        takes: In words, for the error.
        accepts: Returns whether the setting takes a value.
        is_secret: Whether a value may contain a password, so that it is not shown as it is.
        is_key: Whether nothing of a value is shown.
    """

    takes: str
    accepts: Callable[[object], bool]
    is_secret: bool = False
    is_key: bool = False

    def shown(self, value: object) -> object:
        """Return a value, valid or not, as errors and logs may show it."""
        if self.is_key and value:
            return HIDDEN
        if not self.is_secret or not value:
            return value
        is_url = isinstance(value, str) and "://" in value
        return without_password(str(value)) if is_url else HIDDEN


def one_of(words: Any) -> Kind:
    """Return what takes any of the words of a ``Literal``."""
    return Kind(
        f"takes one of {', '.join(get_args(words))}", lambda value: value in get_args(words)
    )


def list_of(words: Sequence[str]) -> Kind:
    """Return what takes a list of some of these words."""
    return Kind(
        f"takes a list of any of {', '.join(words)}",
        lambda value: is_list_of_words(value) and set(value) <= set(words),
    )


def whole_number(maximum: int) -> Kind:
    """Return what takes a whole number from 1 to a maximum."""
    return Kind(
        f"takes a whole number from 1 to {maximum}", lambda value: _is_whole(value, maximum)
    )


def optional(kind: Kind) -> Kind:
    """Return what also takes None."""
    takes = f"takes None, or {kind.takes.removeprefix('takes ')}"
    return kind._replace(takes=takes, accepts=lambda value: value is None or kind.accepts(value))


def is_list_of_words(value: object) -> TypeGuard[Sequence[str]]:
    """Return whether a value is a list or a tuple of texts."""
    return isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)


def _is_whole(value: object, maximum: int) -> bool:
    """Return whether a value is a whole number from 1 to a maximum."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= maximum


def is_positive(value: object) -> bool:
    """Return whether a value is a positive number of seconds, at most a year."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= A_YEAR


def layout_of(value: Any, tick: float) -> Layout:
    """Return the layout that a setting describes.

    Args:
        value: A value that :data:`LAYOUT` accepts.
        tick: The resolution in seconds of a layout that does not bring its own.
    """
    if isinstance(value, Layout):
        return value
    if isinstance(value, str):
        return _LAYOUTS[value](tick=tick)
    if isinstance(value, Mapping):
        options = dict(value)
        name = options.pop("name")
        if name == "custom":
            return custom(**options)
        return _LAYOUTS[name](**{"tick": tick, **options})
    return custom(value)


def _is_prefix(value: object) -> bool:
    return (
        isinstance(value, str)
        and 0 < len(value) <= MAX_PREFIX_LENGTH
        and value.isascii()
        and all(character.isalnum() or character in "-_:." for character in value)
        and not value.startswith("amq.")
    )


def _is_layout(value: object) -> bool:
    if isinstance(value, Mapping):
        return value.get("name") in (*_LAYOUTS, "custom")
    return (isinstance(value, str) and value in _LAYOUTS) or isinstance(
        value, list | tuple | Layout
    )


def _is_tick(value: object) -> bool:
    return is_positive(value) and (Fraction(repr(value)) * 1000).denominator == 1


def _is_pause(value: object) -> bool:
    return is_positive(value) or (value == 0 and not isinstance(value, bool))


def _is_signing_key(value: object) -> bool:
    try:
        SigningKeys(cast(Any, value))
    except (InvalidSigningKey, TypeError):
        return False
    return True


FLAG: Final = Kind("takes True or False", lambda value: isinstance(value, bool))

NAMES: Final = Kind("takes a list of names in which * and ? may stand", is_list_of_words)

SECONDS: Final = Kind("takes a positive number of seconds, at most 366 days", is_positive)

LONG_SECONDS: Final = Kind(
    f"takes a positive number of seconds, at most {MAX_DUE_MS // 1000}",
    lambda value: (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 < value <= MAX_DUE_MS // 1000
    ),
)

SECONDS_OR_ZERO: Final = Kind(
    "takes 0 or a positive number of seconds, at most 366 days", _is_pause
)

SIGNING_KEY: Final = Kind(
    f"takes a text of at least {MIN_KEY_BYTES} bytes, or a list of such texts, of which the first "
    "signs: python -c 'import secrets; print(secrets.token_hex(32))' makes one",
    _is_signing_key,
    is_key=True,
)

TICK: Final = Kind(
    "takes a positive number of seconds, in whole milliseconds, at most 366 days", _is_tick
)

NAME_PREFIX: Final = Kind(
    f"takes 1 to {MAX_PREFIX_LENGTH} letters, digits, '-', '_', ':' and '.'; 'amq.' is the "
    "broker's own",
    _is_prefix,
)

LAYOUT: Final = Kind(
    'takes "clock", "binary", "geometric", a mapping with one of these or "custom" as its "name", '
    "a list of (name, base, unit), or a celery_rabbitdelay.kombu.Layout",
    _is_layout,
)

REDIS_URL: Final = Kind(
    "takes the URL of a Redis",
    lambda value: isinstance(value, str) and "://" in value,
    is_secret=True,
)

CLIENT_OPTIONS: Final = Kind(
    "takes a mapping of arguments of redis-py's client",
    lambda value: isinstance(value, Mapping),
    is_secret=True,
)

INTERFACE: Final = Kind(
    "takes the address of an interface of this machine, for example 0.0.0.0",
    lambda value: isinstance(value, str) and value != "",
)
