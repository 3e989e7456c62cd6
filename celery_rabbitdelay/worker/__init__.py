"""The parts of ``celery worker`` processes.

Read ``bootsteps`` (the start of a worker and of its modules), ``restore`` (restores an arriving
task's exchange, routing key and headers), ``early_tasks`` (puts tasks back into the levels) and
``celery_requests`` (refuses a message if Celery raises an error about it). ``early_tasks`` and
additions work in a ``batch_thread``, outside the worker's event loop. ``celery_internals`` contains
all uses of Celery's private parts.
"""
