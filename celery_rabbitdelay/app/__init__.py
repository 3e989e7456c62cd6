"""The producer side of Celery: the application whose delays wait in RabbitMQ.

Code that only a worker runs is in :mod:`celery_rabbitdelay.worker`.

Read ``settings``, ``application`` (``send_task``, which sees every send) with ``options``,
``connected`` and ``extension`` (``app.rabbitdelay``), ``task`` and ``canvas``; then ``sending``.
``waiting_tasks`` is ``cancel``, ``postpone`` and ``pending``. ``destinations`` is what the
application names, and where the modules may publish. ``control`` is remote control, with revoke and
purge; ``instruments`` is what a process counts if metrics are in use. ``celery_internals`` has all
uses of Celery's private parts.
"""
