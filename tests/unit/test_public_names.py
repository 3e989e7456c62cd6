"""What users import, and what comes with it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import celery_rabbitdelay
from celery_rabbitdelay import RabbitDelayError, exceptions

PACKAGE = Path(celery_rabbitdelay.__file__).parent


@pytest.mark.parametrize("module", ["celery_rabbitdelay", "celery_rabbitdelay.kombu"])
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


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Cellery'"):
        celery_rabbitdelay.Cellery  # noqa: B018 - the access is what is tested


def test_the_top_floor_has_the_rooms_and_nothing_else() -> None:
    rooms = {
        *("levels", "publishing", "registry", "modules", "app", "worker", "operations", "spark"),
        *("schedules", "web", "command", "testing"),
    }
    files = {"__init__.py", "exceptions.py", "kombu.py", "py.typed"}
    assert {path.name for path in PACKAGE.iterdir()} - {"__pycache__"} == rooms | files
