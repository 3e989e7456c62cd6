"""What was ordered."""

from django.db import models


class Order(models.Model):
    """An order, and when its customer was reminded of it."""

    customer = models.CharField(max_length=100)
    reminded_at = models.DateTimeField(null=True)
