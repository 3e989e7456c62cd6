"""The shop's application, with several configurations for one session of Spark.

``tests.integration.spark_apps:NAME`` is the application whose settings the environment variable
``SPARK_APPS`` holds under that name, as JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from tests.integration.shop import make_app

APPS = "SPARK_APPS"


def environment(settings: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Return what Spark's Python processes find in their environment.

    Args:
        settings: For each name what :func:`tests.integration.shop.make_app` takes.
    """
    return {APPS: json.dumps(settings)}


def __getattr__(name: str) -> Any:
    settings = json.loads(os.environ.get(APPS, "{}"))
    if name not in settings:
        raise AttributeError(name)
    return make_app(settings[name])
