"""What runs inside ``celery worker`` processes.

Read ``bootsteps`` (how a worker becomes ready, and starts the modules), ``restore`` (a task arrives
and looks as if it had had no delay), ``early_tasks`` (a task arrives before it is due) and
``status`` (the control command that says what the modules do). ``celery_internals`` has all uses of
the worker's private parts.
"""
