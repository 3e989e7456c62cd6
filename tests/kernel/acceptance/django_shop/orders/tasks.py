"""The tasks that a worker runs."""

from celery import shared_task
from django.utils import timezone

from orders.models import Order


@shared_task(bind=True)
def remind(self, order_id):
    """Remind a customer of an order; return what the task sees of its delay."""
    now = timezone.now()
    Order.objects.filter(pk=order_id).update(reminded_at=now)
    return {
        "at": now.timestamp(),
        "due": self.request.headers["rabbitdelay-due"] / 1000,
        "eta": self.request.eta,
    }


@shared_task
def remind_all():
    """Remind all customers who were not reminded yet, a second from now."""
    for order in Order.objects.filter(reminded_at=None):
        remind.apply_async((order.pk,), countdown=1)
