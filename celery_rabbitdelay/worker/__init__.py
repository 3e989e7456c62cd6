"""The parts of ``celery worker`` processes.

Read ``bootsteps`` (the start of a worker and of its modules), ``restore`` (makes an arriving task
look as if it had had no delay), ``early_tasks`` (puts tasks back into the levels) and
``celery_requests`` (refuses a message if Celery raises an error about it). ``early_tasks`` and
additions work in a ``batch_thread``, beside the event loop of the worker. ``celery_internals``
contains all uses of Celery's private parts.
"""
