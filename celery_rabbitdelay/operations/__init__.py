"""The operator's work with messages that wait; the command line and Spark call this package.

It knows nothing of Spark, and of terminals only how to show a bar. Read ``status`` (what
waits, and what is due next), ``route`` (a delay's route explained), ``declare`` and ``delete`` (the
levels on the broker), ``export`` (the topology in other formats), ``undeliverable`` (a copy of each
message that could not be delivered) and ``progress_bar`` (shown while something takes long).
"""
