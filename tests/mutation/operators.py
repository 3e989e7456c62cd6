"""Ways to break a Python file in one place.

A comparison or an operator becomes another one, a sign goes, a constant gets another value, a
condition its opposite, and a return returns None. The wording of messages is left alone: a text of
several words is not changed but emptied, and the literal parts of f-strings, and all of what is
raised, stay as they are.
"""

import ast
import copy
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

_PAIRS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
}
COMPARISONS: Final = {**_PAIRS, **{other: one for one, other in _PAIRS.items()}}

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


def unbroken(source: str) -> str:
    """Return a file as it is compared with its mutants: without comments, and laid out afresh."""
    return ast.unparse(ast.parse(source))


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
            literal = isinstance(node, ast.JoinedStr)
            for index, each in enumerate(value):
                if isinstance(each, ast.AST) and not _is_text_alone(each, literal):
                    yield from _places(each, (*path, name, index))


def _is_left_alone(node: ast.AST, field: str) -> bool:
    match node:
        case ast.AnnAssign(annotation=ast.Name(id="TypeAlias")):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.Raise():
            return True
        case ast.FormattedValue():
            return field == "format_spec"
    return field in ("annotation", "returns", "decorator_list", "bases")


def _is_text_alone(node: ast.AST, in_f_string: bool) -> bool:
    """Whether it is a docstring, or a literal part of an f-string."""
    text = node if in_f_string else node.value if isinstance(node, ast.Expr) else None
    return isinstance(text, ast.Constant)


def _changes(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare(ops=ops):
            yield from (f"comparison {n}" for n, op in enumerate(ops) if type(op) in COMPARISONS)
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield "operator"
        case ast.BoolOp():
            yield "and/or"
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "sign"
        case ast.Constant(value=bool() | int() | float()):
            yield "constant"
        case ast.Constant(value=str() | bytes() as text) if text:
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
    change, _, index = change.partition(" ")
    match change:
        case "comparison":
            node.ops[int(index)] = COMPARISONS[type(node.ops[int(index)])]()
        case "operator":
            node.op = OPERATORS[type(node.op)]()
        case "and/or":
            node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        case "sign":
            # "not x" becomes whether x is true, "-x" becomes x.
            is_not = isinstance(node.op, ast.Not)
            node.op, node.operand = (
                (ast.Not(), ast.UnaryOp(ast.Not(), node.operand))
                if is_not
                else (ast.UAdd(), node.operand)
            )
        case "constant":
            node.value = _other(node.value)
        case "condition":
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case "return":
            node.value = ast.Constant(None)
    ast.fix_missing_locations(broken)
    after = ast.unparse(node).splitlines()[0]
    return Mutant(node.lineno, f"{change}: {before[:60]}  ->  {after[:60]}", ast.unparse(broken))


def _other(value: bool | float | str | bytes) -> bool | float | str | bytes:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, bytes):
        return value + b"x"
    # What a message says has to be tested, its wording has not.
    return "" if " " in value else f"{value}x"
