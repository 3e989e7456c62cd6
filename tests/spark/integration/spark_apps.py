"""The shop's application, with several configurations for one session of Spark.

``tests.spark.integration.spark_apps:NAME`` is the application whose settings are in the file
``NAME`` of the folder that the environment variable ``SPARK_APPS`` names, as JSON. Python processes
of Spark that have made an application keep it, so each has a name of its own.
"""

import json
import os
from pathlib import Path
from typing import Any, Final

from tests.kernel.integration.shop import make_app

APPS: Final = "SPARK_APPS"

#: Where to find the application of the fixture ``spark_shop``.
APP: Final = "tests.spark.integration.spark_apps:shop"


def publish(folder: Path, name: str, settings: dict[str, Any]) -> None:
    """Let the driver and Spark's Python processes find an application.

    Args:
        folder: That of the session.
        name: The application's name.
        settings: What :func:`tests.kernel.integration.shop.make_app` takes; with ``commits``: False
            for one whose drivers die before they commit.
    """
    (folder / name).write_text(json.dumps(settings))


def __getattr__(name: str) -> Any:
    file = Path(os.environ.get(APPS, os.devnull), name)
    if not file.is_file():
        raise AttributeError(name)
    settings = json.loads(file.read_text())
    commits = settings.pop("commits", True)
    app: Any = make_app(settings)
    if not commits:
        app.rabbitdelay.commit_job = lambda job: None
    globals()[name] = app
    return app
