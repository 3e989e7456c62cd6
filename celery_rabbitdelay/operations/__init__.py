"""The operator's work with messages that wait; the command line and Spark call this package.

It knows nothing of Spark, and of terminals only how to show a bar. To look: ``status`` (what waits,
and what is due next), ``route`` (a delay's route explained), ``verify`` (what on the broker breaks
a promise) and ``undeliverable`` (a copy of each message that could not be delivered). To lay out:
``declare``, ``delete``, and ``export`` (the topology in other formats). To move: ``source`` takes
messages from queues, ``mover`` publishes them elsewhere and acknowledges them once they are
confirmed, and ``migration`` and ``adoption`` say what is published for each. ``progress_bar`` is
shown while something takes long.
"""
