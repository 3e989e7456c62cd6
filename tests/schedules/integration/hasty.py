"""What a worker imports to look after schedules twice a second, and to send again what is late.

Celery's setting ``imports`` names it. A test's own process does not import it.
"""

from celery_rabbitdelay.schedules import arrivals, record

vars(arrivals)["CHECK_EVERY"] = 0.5
vars(record).update(HEALING_MS=3_000, HEAL_AFTER_MS=2_000)
