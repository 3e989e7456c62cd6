"""The how-to page for Django shows the project that the acceptance tests run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.acceptance.django_project import BEAT, MIGRATE, SOURCE, WORKER

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "django.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", blocks("python"))
def test_each_python_block_stands_in_the_project(block: str) -> None:
    sources = [path.read_text() for path in SOURCE.rglob("*.py")]
    assert any(block in source for source in sources)


def test_the_commands_are_those_that_the_tests_run() -> None:
    assert "".join(blocks("sh")).splitlines() == [MIGRATE, WORKER, BEAT]
