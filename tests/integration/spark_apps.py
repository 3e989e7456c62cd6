"""The shop's application, with several configurations for one session of Spark.

``tests.integration.spark_apps:NAME`` is the application whose settings are in the file ``NAME`` of
the folder that the environment variable ``SPARK_APPS`` names, as JSON. Python processes of Spark
that have made an application keep it, so each has a name of its own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from tests.integration.shop import make_app

APPS: Final = "SPARK_APPS"


def name_of(module: str) -> str:
    """Return the name of the application of a test module, by the module's name."""
    return module.rpartition(".")[2]


def app_of(module: str) -> str:
    """Return the import path of that application."""
    return f"{__name__}:{name_of(module)}"


def publish(folder: Path, name: str, settings: dict[str, Any]) -> None:
    """Let Spark's Python processes find an application.

    Args:
        folder: That of the session.
        name: The application's name.
        settings: What :func:`tests.integration.shop.make_app` takes.
    """
    (folder / name).write_text(json.dumps(settings))


def __getattr__(name: str) -> Any:
    file = Path(os.environ.get(APPS, os.devnull), name)
    if not file.is_file():
        raise AttributeError(name)
    return make_app(json.loads(file.read_text()))
