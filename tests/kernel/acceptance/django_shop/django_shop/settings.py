"""Django's settings."""

import json
import os
from pathlib import Path

BASE_DIR = Path(__file__).resolve().parent.parent

SECRET_KEY = "only for tests"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = ["django_celery_results", "django_celery_beat", "orders"]

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": BASE_DIR / "db.sqlite3",
        "OPTIONS": {"timeout": 60},
    }
}

CELERY_BROKER_URL = "amqp://"
CELERY_RESULT_BACKEND = "django-db"
CELERY_RESULT_EXTENDED = True
CELERY_RABBITDELAY_PREFIX = "django_shop"

# Small levels: they reach from 0.1 to 999.9 s, and are declared in a blink.
CELERY_RABBITDELAY_LAYOUT = [
    ("seconds", 10, 100),
    ("seconds", 10, 10),
    ("seconds", 10, 1),
    ("ms", 10, 0.1),
]
CELERY_TASK_DEFAULT_QUEUE = "django_shop"

# The tests' broker, and what else a test sets.
globals().update(json.loads(os.environ.get("DJANGO_SHOP", "{}")))
