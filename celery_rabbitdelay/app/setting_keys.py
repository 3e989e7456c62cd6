"""How the ``rabbitdelay_*`` settings are written in a Celery configuration. Pure."""

from __future__ import annotations

from typing import Final

#: The beginning of all our keys.
PREFIX: Final = "rabbitdelay_"


def name_of(key: object, namespace: str | None) -> str | None:
    """Return the setting that is read from a configuration key, None if it is not ours."""
    if not isinstance(key, str):
        return None
    if key.startswith(PREFIX):
        return key.removeprefix(PREFIX)
    start = key_of("", namespace)
    return key.removeprefix(start).lower() if key.startswith(start) else None


def name_in_capitals(key: object, namespace: str | None) -> str | None:
    """Return the setting that is named by an upper-case key that Celery ignores.

    That is how Celery's own keys were written before 4.0, most of them behind ``CELERY_``, and how
    those of Django are. Behind a namespace, ``CELERY_`` may be another application's namespace.
    """
    capitals = PREFIX.upper()
    if not isinstance(key, str) or not key.isupper():
        return None
    bare = key if namespace else key.removeprefix("CELERY_")
    return bare.removeprefix(capitals).lower() if bare.startswith(capitals) else None


def key_of(name: str, namespace: str | None) -> str:
    """Return the key of a setting. It is in capitals where the namespace is, as in Celery."""
    if not namespace:
        return PREFIX + name
    key = f"{namespace.rstrip('_')}_{PREFIX}{name}"
    return key.upper() if namespace.isupper() else key.lower()
