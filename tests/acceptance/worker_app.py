"""The template of the worker's ``app.py``.

pytest-celery replaces the lines ``imports = None``, ``app = Celery(...)`` and ``config = None``, so
they must stay as they are.
"""

from __future__ import annotations

from celery_rabbitdelay import Celery

imports = None

app = Celery("celery_test_app")
config = None

if config:
    app.config_from_object(config)
