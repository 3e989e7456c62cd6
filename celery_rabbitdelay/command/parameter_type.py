"""The type of an option or argument that a function reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


class ParameterType(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # by click's version
    """Reads a parameter by a function, and names the parameter if that cannot read it.

    Args:
        name: What the parameter is, for the help.
        read: Returns the value of a text. It also gets the parameter's name, and raises a
            :class:`ValueError` that says what is wrong.
    """

    def __init__(self, name: str, read: Callable[[str, str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value; click also asks about values that are read already."""
        if not isinstance(value, str):
            return value
        try:
            return self._read(value, (param.name if param is not None else None) or self.name)
        except ValueError as wrong:
            self.fail(str(wrong), param, ctx)
