"""The operator's work with messages that wait; the command line and Spark call this package.

It knows nothing of Spark, and of terminals only how to show a bar.

* To look: ``status`` (what waits, and what is due next) and ``verify`` (what on the broker breaks
  a promise).
* To lay out: ``export`` (the topology in other formats) and ``permissions`` (what each user needs).
* To move: ``source`` takes messages from queues, ``mover`` publishes them elsewhere and
  acknowledges them once they are confirmed; ``migration`` and ``adoption`` convert them,
  and ``destinations`` binds the queues that they are for.
* Undeliverable messages: ``undeliverable_reader`` takes the messages and requeues those that stay,
  ``undeliverable`` makes a copy of each; then ``undeliverable_filter``, ``undeliverable_summary``
  and ``undeliverable_export``; ``removal`` (messages that leave their queue) with ``redrive`` and
  ``purge``, and ``redrive_destinations`` (the destinations that an application allows).

Both read on a ``consumer_connection``.

``progress_bar`` is shown while something takes long.
"""
