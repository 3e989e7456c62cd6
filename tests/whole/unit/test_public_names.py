"""What users import, and what comes with it."""

import inspect
import subprocess
import sys
from difflib import unified_diff

import pytest

import celery_rabbitdelay
from celery_rabbitdelay import RabbitDelayError, exceptions
from tests.whole.public_surface import FILE, surface


@pytest.mark.parametrize(
    "module",
    [
        *("celery_rabbitdelay", "celery_rabbitdelay.kombu"),
        "celery_rabbitdelay.testing.plugin",  # pytest loads it in every run
    ],
)
def test_importing_what_a_kombu_program_needs_imports_neither_celery_nor_redis(module: str) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    imported = set(run.stdout.split())
    assert module in imported
    assert imported.isdisjoint({"celery", "redis", "pyspark"})


def test_every_error_is_imported_from_the_package() -> None:
    errors = {
        name
        for name, each in vars(exceptions).items()
        if inspect.isclass(each) and issubclass(each, RabbitDelayError)
    }
    assert errors == set(exceptions.__all__)
    assert errors <= set(celery_rabbitdelay.__all__)
    for name in celery_rabbitdelay.__all__:
        assert hasattr(celery_rabbitdelay, name)


def test_the_public_surface_is_the_one_that_was_written_down() -> None:
    written, found = (text.splitlines() for text in (FILE.read_text(), surface()))
    difference = "\n".join(unified_diff(written, found, "written down", "found", lineterm=""))
    assert not difference, (
        f"run `python -m tests.whole.public_surface` if you mean it\n{difference}"
    )
