"""The rules of the house: which file imports which, and how large a file and a function are."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

import celery_rabbitdelay

PACKAGE: Final = Path(celery_rabbitdelay.__file__).parent

#: The most lines of code of a file, and the most lines of a function without its docstring.
MOST_OF_A_FILE: Final = 450
MOST_OF_A_FUNCTION: Final = 60

FILES: Final = sorted(PACKAGE.rglob("*.py"))
MODULES: Final = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in FILES
}


def imported(path: Path) -> Iterator[str]:
    """Yield the modules of the package that a file imports, also for type checkers only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                yield whole if whole in MODULES else node.module


def test_no_file_imports_itself_through_others() -> None:
    # The package's own file names, for type checkers, what it imports when it is first used.
    graph = {
        module: {each for each in imported(path) if each in MODULES} - {"celery_rabbitdelay"}
        for module, path in MODULES.items()
    }
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph) - 1


def test_a_folder_names_only_files_that_exist() -> None:
    roots = PACKAGE, PACKAGE.parent / "tests"
    lost = [
        f"{path}: {name}"
        for root in roots
        for path in root.rglob("__init__.py")
        for name in re.findall(
            r"``([\w/]+\.py)``", ast.get_docstring(ast.parse(path.read_text())) or ""
        )
        if not any((folder / name).exists() for folder in (path.parent, *roots, PACKAGE.parent))
    ]
    assert lost == []


def test_files_and_functions_stay_small_enough_to_be_read_at_once() -> None:
    large = [path.name for path in FILES if lines_of_code(path) > MOST_OF_A_FILE]
    assert large == []
    long = [
        f"{path.name}: {node.name}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and lines_without_docstring(node) > MOST_OF_A_FUNCTION
    ]
    assert long == []


def lines_of_code(path: Path) -> int:
    """Return how many lines of a file hold code, and not a docstring or a comment."""
    text = path.read_text()
    silent = tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*silent, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node) is not None and first is not None:
                lines -= set(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(lines)


def lines_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    docstring = ast.get_docstring(function, clean=False) or ""
    return (function.end_lineno or 0) - function.lineno + 1 - len(docstring.splitlines())
