"""The operator's commands for waiting messages.

* To inspect: ``status`` (waiting messages and the next due time), and ``verify`` (faults on the
  broker) with ``inventory`` and ``checks``; ``workers`` queries the workers, and ``worker_status``
  answers; ``management`` is the management API, and ``quirks`` lists the differences between
  versions of RabbitMQ.
* To manage the levels: ``export`` (the topology in other formats), ``permissions`` (of the
  broker's users) and ``delete``.
* To move messages: ``source`` takes them from queues, ``mover`` publishes them elsewhere and
  acknowledges them once they are confirmed, and ``conversion`` converts messages of other levels
  and of Celery's own delays; ``move_commands`` has ``migrate``, ``transfer`` and ``adopt``.
* ``undeliverable`` reads, redrives and deletes undeliverable messages; ``reasons`` finds out why a
  message is undeliverable, and ``redriving`` checks whether it may leave.

This package imports only the kernel. ``status`` and ``verify`` query other additions through the
kernel's seams.
"""
