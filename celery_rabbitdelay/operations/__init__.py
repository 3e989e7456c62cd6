"""The operator's work with messages that wait, from what it does to its commands.

* To look: ``status`` (what waits, and what is due next), and ``verify`` (what on the broker breaks
  a promise) with ``inventory`` and ``checks``; ``management`` asks the management API, and
  ``quirks`` names where versions of RabbitMQ differ.
* To lay out: ``export`` (the topology in other formats), ``permissions`` (what each user needs) and
  ``delete``.
* To move messages: ``source`` takes them from queues, ``mover`` publishes them elsewhere and
  acknowledges them once they are confirmed, and ``conversion`` converts those of other levels and
  mechanisms; ``move_commands`` has ``migrate``, ``transfer`` and ``adopt``.
* ``undeliverable`` reads, redrives and deletes what could not be delivered; ``reasons`` says why a
  message could not be, and ``redriving`` decides what may go where.

It stands on the kernel alone; only ``status`` asks other additions, where the settings name a
registry.
"""
