"""The same as ``django_shop/celery.py``, with Celery's own class; the tests put it there."""

import os

from celery import Celery

from celery_rabbitdelay import install

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "django_shop.settings")

app = install(Celery("django_shop"))
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
