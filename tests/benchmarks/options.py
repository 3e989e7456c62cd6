"""Options of a program at the terminal, read off the function that takes them."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints


def first_line(function: Callable[..., object]) -> str:
    """Return what a function does, in a line."""
    return (function.__doc__ or "").partition("\n")[0]


def choices(function: Callable[..., object]) -> dict[str, tuple[Any, ...]]:
    """Return the values of each parameter that is a ``Literal``."""
    hints = get_type_hints(function)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def read(function: Callable[..., object], program: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the keyword-only parameters of a function as the arguments of a program give them.

    A parameter is an option of its name. It takes one of the values of a ``Literal``, values of a
    list, nothing for a bool, and otherwise a value of its default's type.
    """
    parser = argparse.ArgumentParser(prog=program, description=function.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    allowed = choices(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        default = parameter.default
        how: dict[str, Any]
        if isinstance(default, bool):
            how = {"action": "store_true"}
        elif isinstance(default, tuple):
            how = {"type": type(default[0]), "nargs": "+"}
        else:
            how = {"type": type(default), "choices": allowed.get(name)}
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, default=default, help=f"({default})", **how)
    return vars(parser.parse_args(arguments))
