"""The mutants that ``make mutation`` makes."""

from __future__ import annotations

import ast

import pytest

from tests.mutation.__main__ import pure_files
from tests.mutation.operators import mutants, unbroken


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a < b <= c", {"a <= b <= c", "a < b < c"}),
        ("a == b", {"a != b"}),
        ("a and b", {"a or b"}),
        ("not a", {"not not a"}),
        ("-a", {"+a"}),
        ("a + b", {"a - b"}),
        ("x = 1", {"x = 2"}),
        ("x = 0.5", {"x = 1.5"}),
        ("x = True", {"x = False"}),
        ("x = 'name'", {"x = 'namex'"}),
        ("x = 'what users read'", {"x = ''"}),
        ("x = b'bytes'", {"x = b'bytesx'"}),
        ("f'{a + b} are too many'", {"f'{a - b} are too many'"}),
        ("y if x else z", {"y if not x else z"}),
        ("def f():\n    return x", {"def f():\n    return None"}),
    ],
)
def test_a_file_is_broken_in_one_place_at_a_time(line: str, expected: set[str]) -> None:
    assert {mutant.source for mutant in mutants(line)} == expected


@pytest.mark.parametrize(
    "line",
    [
        '"""A docstring."""',
        "__all__ = ['a']",
        "Delay: TypeAlias = 'float'",
        "def f(a: 'int') -> 'int':\n    return None",
        "raise ValueError('a text', 1)",
        "f'{x:02d} wide'",
        "@cached(5)\ndef f():\n    pass",
    ],
)
def test_annotations_docstrings_decorators_and_messages_are_left_alone(line: str) -> None:
    assert mutants(line) == []


def test_a_file_without_a_mutant_means_what_it_meant() -> None:
    source = "# why\nx = (1 +\n     2)\n"
    assert ast.dump(ast.parse(unbroken(source))) == ast.dump(ast.parse(source))


def test_only_files_that_open_no_connection_are_broken() -> None:
    files = pure_files()
    assert {"levels/layout.py", "modules/checkin.py"} <= set(files)
    assert not {"modules/consumer.py", "modules/service.py", "levels/__init__.py"} & set(files)
