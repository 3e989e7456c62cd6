"""Making one class of ours and of one that the user, or Django, has chosen."""

from __future__ import annotations

from typing import Any

__all__ = ["mixed"]


def mixed(ours: type[Any], base: type[Any]) -> type[Any]:
    """Return a class that is ``ours`` and ``base``."""
    if issubclass(base, ours):
        return base
    if issubclass(ours, base):
        return ours
    attributes = {"__module__": base.__module__, "_installed_on": base}
    return type(base.__name__, (ours, base), attributes)
