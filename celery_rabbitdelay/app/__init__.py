"""The producer side of Celery: the application whose delays wait in RabbitMQ.

Code that only a worker runs is in :mod:`celery_rabbitdelay.worker`.

Read ``settings``, ``application`` (``send_task``, which sees every send) with ``options`` and
``task_sending`` (where a task goes), ``extension`` (``app.rabbitdelay``), ``task_producer``,
``task`` and ``canvas``; then ``send_many`` with ``rows``, ``grouping``, ``task_messages`` and
``message_template``. ``destinations`` is what the application names, and where the modules may
publish. ``control`` is remote control, with revoke and purge; ``metrics`` is what a process counts.
``celery_internals`` has all uses of Celery's private parts.
"""
