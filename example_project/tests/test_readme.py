"""The README shows the code that runs, and newcomers can read all of it."""

from __future__ import annotations

import re
from pathlib import Path

import example_project

EXAMPLE = Path(example_project.__file__).parent
TOP_FLOOR = {path.name: path.read_text() for path in sorted(EXAMPLE.glob("*.py"))}
README = (EXAMPLE / "README.md").read_text()


def test_every_code_block_stands_in_a_file_beside_the_readme() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        assert any(block in source for source in TOP_FLOOR.values()), block


def test_what_newcomers_copy_has_under_150_lines() -> None:
    assert sum(len(source.splitlines()) for source in TOP_FLOOR.values()) < 150


def test_what_newcomers_copy_does_not_need_the_demonstration() -> None:
    for name in ("shop.py", "spark_job.py"):
        assert "demonstration" not in TOP_FLOOR[name]


def test_the_readme_names_every_file_of_the_demonstration() -> None:
    named = set(re.findall(r"`(\w+\.py)`", README))
    assert named == {path.name for path in (EXAMPLE / "demonstration").glob("[a-z]*.py")}


def test_the_readme_runs_every_pipeline() -> None:
    run = set(re.findall(r"\$ python -m example_project\.pipelines\.(\w+)", README))
    runnable = {
        path.stem for path in (EXAMPLE / "pipelines").glob("*.py") if "__main__" in path.read_text()
    }
    assert run == runnable


def test_a_pipeline_has_under_150_lines() -> None:
    for path in (EXAMPLE / "pipelines").glob("*.py"):
        assert len(path.read_text().splitlines()) < 150, path


def test_the_modules_that_the_readme_runs_exist() -> None:
    modules = set(re.findall(r"example_project(?:\.[a-z_]+)+(?= |\n)", README))
    assert len(modules) == 8
    for module in modules:
        assert (EXAMPLE.parent / (module.replace(".", "/") + ".py")).is_file(), module


def test_the_demonstration_imports_only_what_is_public() -> None:
    rooms = ("kombu", "spark", "testing")
    public = {"celery_rabbitdelay", *(f"celery_rabbitdelay.{room}" for room in rooms)}
    for path in EXAMPLE.rglob("*.py"):
        imports = r"^ *(?:from|import) (celery_rabbitdelay[\w.]*)"
        imported = re.findall(imports, path.read_text(), flags=re.MULTILINE)
        assert set(imported) <= public, path
