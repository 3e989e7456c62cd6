"""The Celery application whose delays wait in RabbitMQ: everything that a producer needs.

The producer's side of Celery is in this room; code that only a worker runs is in
:mod:`celery_rabbitdelay.worker`.

Read ``settings``, ``application`` (``send_task``, which sees every send), ``extension``
(``app.rabbitdelay``), ``task_producer``, ``task`` and ``canvas``; then ``send_many`` with ``rows``,
``grouping``, ``task_messages`` and ``message_template``. ``celery_internals`` has all uses of
Celery's private parts.
"""
