"""What a worker imports to give the lease of a schedule's run back only when it ends itself.

Celery's setting ``imports`` names it. A test's own process does not import it.
"""

from celery_rabbitdelay.schedules import runs

vars(runs)["POLL"] = 3600
