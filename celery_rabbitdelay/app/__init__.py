"""The Celery application whose delays wait in RabbitMQ: everything that a producer needs.

What a Celery producer does comes in here; what only a worker does is in
:mod:`celery_rabbitdelay.worker`.

Read ``settings``, ``application`` (``send_task``, the one place that sees every send),
``extension`` (``app.rabbitdelay``), ``task_producer``, ``task`` and ``canvas``; then ``send_many``
with ``grouping``, ``task_messages`` and ``message_template``.
"""
