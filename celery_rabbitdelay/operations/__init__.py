"""The operator's work with messages that wait; the command line and Spark call this package.

It knows nothing of Spark, and of terminals only how to show a bar. ``source`` takes messages from
queues, and ``mover`` publishes them elsewhere and acknowledges them once they are confirmed;
``migration`` and ``adoption`` say what is published for each. ``verify`` finds what on the broker
breaks a promise. Read ``undeliverable`` (a copy of each message that could not be delivered) and
``progress_bar`` (shown while something takes long) as well.
"""
