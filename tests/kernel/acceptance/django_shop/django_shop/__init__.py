"""A small Django project whose tasks wait in RabbitMQ."""

from django_shop.celery import app as celery_app

__all__ = ["celery_app"]
