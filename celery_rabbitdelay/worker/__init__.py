"""What runs inside ``celery worker`` processes.

Read ``bootsteps`` (how a worker becomes ready, and starts the modules), ``restore`` (a task arrives
and looks as if it had had no delay), ``origin`` (where its retries go), ``early_tasks`` (a task
arrives before it is due), ``decisions`` and ``plain_arrivals`` (the registry says whether a task
runs), ``put_back`` (a task goes back into the levels), ``status`` (the control command that says
what the modules do), and ``metrics`` with ``backlog_reader`` (what Prometheus reads).
``decisions`` and ``put_back`` work in a ``batch_thread``, beside the worker's event loop.
``celery_internals`` has all uses of the worker's private parts.
"""
