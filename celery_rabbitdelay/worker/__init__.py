"""What runs inside ``celery worker`` processes.

Read ``bootsteps`` (how a worker becomes ready, and starts the modules), ``restore`` (a task arrives
and looks as if it had had no delay), ``early_tasks`` (a task goes back into the levels),
``decisions`` and ``plain_arrivals`` (the registry says whether a task runs), ``status`` (control
commands) and ``lateness`` (how late tasks arrive). ``decisions`` and ``early_tasks`` work in a
``batch_thread``, beside the worker's event loop; what the latter publishes is sent by
``republishing``. ``celery_internals`` has all uses of the worker's private parts. Occurrences of
schedules are taken by :mod:`celery_rabbitdelay.schedules`.
"""
