"""What the shop's views call."""

from django.db import transaction
from django_celery_beat.models import IntervalSchedule, PeriodicTask
from django_shop import celery_app

from orders.models import Order
from orders.tasks import remind


def place_order(customer, remind_after):
    """Save an order, and remind its customer of it; ``remind_after`` is in seconds."""
    with transaction.atomic():
        order = Order.objects.create(customer=customer)
        remind.apply_async_on_commit((order.pk,), delay=remind_after)
    return order


def place_orders(customers, remind_after):
    """Save many orders, or none, and remind their customers of them."""
    with celery_app.rabbitdelay.pipeline(), transaction.atomic():
        for customer in customers:
            place_order(customer, remind_after)


def remind_every_second():
    """Let beat send a task every second."""
    every_second, _ = IntervalSchedule.objects.get_or_create(
        every=1, period=IntervalSchedule.SECONDS
    )
    PeriodicTask.objects.update_or_create(
        name="remind all",
        defaults={
            "task": "orders.tasks.remind_all",
            "interval": every_second,
            "expire_seconds": 60,
        },
    )
