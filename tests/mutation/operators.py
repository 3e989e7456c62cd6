"""Ways to break a Python file in one place.

A comparison or an operator becomes another one, a constant another value, a condition its opposite,
and a return returns None. The wording of messages is left alone: the texts of f-strings and of what
is raised.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

__all__ = ["Mutant", "mutants"]

COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}

OPERATORS: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


class Mutant(NamedTuple):
    """A file that is broken in one place.

    Attributes:
        line: The place.
        what: How it is broken.
        source: The whole file.
    """

    line: int
    what: str
    source: str


def mutants(source: str) -> list[Mutant]:
    """Return all mutants of a file.

    Left alone are annotations, docstrings, messages and ``__all__``.
    """
    tree = ast.parse(source)
    places = list(_places(tree))
    return [_mutant(tree, path, change) for path, change in places]


#: The way from the tree to a node: names of fields, and indices of lists.
Path = tuple[str | int, ...]


def _places(node: ast.AST, path: Path = ()) -> Iterator[tuple[Path, str]]:
    for change in _changes(node):
        yield path, change
    for name, value in ast.iter_fields(node):
        if _is_left_alone(node, name):
            continue
        if isinstance(value, ast.AST):
            yield from _places(value, (*path, name))
        elif isinstance(value, list):
            for index, each in enumerate(value):
                if isinstance(each, ast.AST) and not _is_text_alone(each):
                    yield from _places(each, (*path, name, index))


def _is_left_alone(node: ast.AST, field: str) -> bool:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        # An alias of a type is not run either: annotations are strings in these files.
        alias = isinstance(node.annotation, ast.Name) and node.annotation.id == "TypeAlias"
        return field == "annotation" or (alias and field == "value")
    if isinstance(node, ast.Assign):
        return any(isinstance(each, ast.Name) and each.id == "__all__" for each in node.targets)
    if isinstance(node, ast.JoinedStr | ast.Raise):
        return True
    return field in ("annotation", "returns", "decorator_list", "bases")


def _is_text_alone(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _changes(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield "comparison"
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield "operator"
        case ast.BoolOp():
            yield "and/or"
        case ast.Constant(value=bool()):
            yield "constant"
        case ast.Constant(value=int()):
            yield "constant"
        case ast.Constant(value=str() as text) if text:
            yield "constant"
        case ast.If() | ast.IfExp() | ast.While():
            yield "condition"
        case ast.Return(value=value) if value is not None and not _is_none(value):
            yield "return"


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _mutant(tree: ast.Module, path: Path, change: str) -> Mutant:
    broken: Any = copy.deepcopy(tree)
    node: Any = broken
    for step in path:
        node = node[step] if isinstance(step, int) else getattr(node, step)
    before = ast.unparse(node).splitlines()[0]
    match change:
        case "comparison":
            node.ops = [COMPARISONS[type(node.ops[0])]()]
        case "operator":
            node.op = OPERATORS[type(node.op)]()
        case "and/or":
            node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        case "constant":
            node.value = _other(node.value)
        case "condition":
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case "return":
            node.value = ast.Constant(None)
    ast.fix_missing_locations(broken)
    after = ast.unparse(node).splitlines()[0]
    return Mutant(node.lineno, f"{change}: {before[:60]}  ->  {after[:60]}", ast.unparse(broken))


def _other(value: bool | int | str) -> bool | int | str:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else f"{value}x"
