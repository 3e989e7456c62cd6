"""The parts of ``celery worker`` processes.

Read ``bootsteps`` (the start of a worker and of its modules), ``restore`` (makes an arriving task
look as if it had had no delay), ``early_tasks`` (puts tasks back into the levels),
``celery_requests`` (confines an error that Celery raises about a message to that message) and
``status`` (control commands). ``early_tasks`` works in a ``batch_thread``, beside the event loop of
the worker, as additions do. ``celery_internals`` contains all uses of Celery's private parts.
"""
