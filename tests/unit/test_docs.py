"""What the documentation says about the tests is true."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "reference" / "senders.md"


def test_each_row_of_the_table_of_senders_names_tests_that_exist() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    headings = [row for row in rows if "shown by" in row]
    assert len(headings) == 3
    for row in rows:
        if row in headings:
            continue
        file, *names = re.findall(r"`((?:integration|unit)/test_\w+\.py|test_\w+)`", row)
        assert names, row
        source = (TESTS / file).read_text()
        for name in names:
            assert f"def {name}(" in source, f"{file} has no {name}"


def test_each_link_of_the_pages_on_top_leads_to_a_file() -> None:
    root = TESTS.parent
    for page in ("README.md", "CONTRIBUTING.md"):
        text = re.sub(r"```.*?```", "", (root / page).read_text(), flags=re.DOTALL)
        targets = re.findall(r"\]\(([^)#\s]+)", text)
        assert targets, page
        for target in targets:
            if not target.startswith("https://"):
                assert (root / target).exists(), f"{page} links to {target}"


def test_contributing_names_each_target_of_make() -> None:
    root = TESTS.parent
    targets = set(re.findall(r"^([a-z-]+):.*##", (root / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^\| `make ([a-z-]+)`", (root / "CONTRIBUTING.md").read_text(), re.M))
    assert named == targets


def test_read_the_code_names_files_that_exist() -> None:
    root = TESTS.parent
    page = (root / "docs" / "explanation" / "read_the_code.md").read_text()
    files = re.findall(r"`([\w/]+\.py)`", page)
    assert len(files) > 10
    for file in files:
        folder = root if file.startswith("tests/") else root / "celery_rabbitdelay"
        assert (folder / file).is_file(), file
