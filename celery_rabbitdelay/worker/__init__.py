"""What runs inside ``celery worker`` processes.

Read ``bootsteps`` (how a worker becomes ready, and starts the modules), ``restore`` (a task arrives
and looks as if it had had no delay), ``early_tasks`` (a task goes back into the levels),
``celery_requests`` (an error that Celery raises about a message concerns that message alone) and
``status`` (control commands). ``early_tasks`` works in a ``batch_thread``, beside the event loop of
the worker, as additions do. ``celery_internals`` has uses of the worker's private parts.
"""
