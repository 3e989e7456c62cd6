"""The producer side of Celery: the application whose delayed tasks wait in RabbitMQ.

Code that only a worker runs is in :mod:`celery_rabbitdelay.worker`.

Read ``settings``; ``application`` (``send_task``, which sees every send) with ``options``;
``task_sending`` and ``pipelines``, which publish a task; then ``canvas``, and ``delays``
with ``extension`` (``app.rabbitdelay``). ``send_many``, ``rows`` and ``copies`` send many tasks
fast; a reader can skip them. ``destinations`` decides where the modules may publish. ``control`` is
remote control, with revoke and purge; ``instruments`` defines the metrics. ``additions`` registers
additions, and ``seams`` has the methods that the kernel calls on them. ``celery_internals`` wraps
Celery's private parts.
"""
