"""The README shows the code that runs, and names the existing files."""

import re
from pathlib import Path

import example_project

EXAMPLE = Path(example_project.__file__).parent
README = (EXAMPLE / "README.md").read_text()


def test_every_code_block_stands_in_a_file_beside_the_readme() -> None:
    sources = [path.read_text() for path in EXAMPLE.glob("*.py")]
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        assert any(block in source for source in sources), block


def test_the_readme_names_existing_files_and_runs_every_pipeline() -> None:
    named = set(re.findall(r"`(\w+\.py)`", README))
    assert named == {path.name for path in (EXAMPLE / "demonstration").glob("[a-z]*.py")}
    modules = set(re.findall(r"example_project(?:\.[a-z_]+)+(?= |\n)", README))
    pipelines = [*(EXAMPLE / "pipelines").glob("*.py")]
    runnable = {path.stem for path in pipelines if "__main__" in path.read_text()}
    assert {f"example_project.pipelines.{each}" for each in runnable} <= modules
    for module in modules:
        assert (EXAMPLE.parent / (module.replace(".", "/") + ".py")).is_file(), module


def test_the_demonstration_imports_only_what_is_public() -> None:
    rooms = ("kombu", "spark", "testing")
    public = {"celery_rabbitdelay", *(f"celery_rabbitdelay.{room}" for room in rooms)}
    for path in EXAMPLE.rglob("*.py"):
        imports = r"^ *(?:from|import) (celery_rabbitdelay[\w.]*)"
        imported = re.findall(imports, path.read_text(), flags=re.MULTILINE)
        assert set(imported) <= public, path
