"""The programs that break files name files that exist."""

from pathlib import Path

import pytest

from tests.mutation import __main__ as pure
from tests.mutation import scripts
from tests.project_copy import REPOSITORY


@pytest.mark.parametrize("file", [*pure.pure_files(), *sorted(pure.NOT_PURE)])
def test_a_pure_file_exists(file: str) -> None:
    assert (REPOSITORY / pure.PACKAGE / file).is_file()


def test_each_room_with_scripts_names_tests_that_exist() -> None:
    paths = (REPOSITORY / scripts.PACKAGE).rglob("*.lua")
    assert {path.relative_to(REPOSITORY / scripts.PACKAGE).parts[0] for path in paths} == {
        *scripts.TESTS
    }
    named = [Path(REPOSITORY, test) for tests in scripts.TESTS.values() for test in tests]
    assert all(path.is_file() for path in named), named
