"""The operator's work with messages that wait; the command line and Spark call this package.

It knows nothing of Spark and of terminals.

* To look: ``status`` (what waits, and what is due next) and ``verify`` (what on the broker breaks
  a promise).
* To decide: ``waiting`` (search the tracked tasks, and decide about all that match).
* To lay out: ``export`` (the topology in other formats) and ``permissions`` (what each user needs).
* ``moving`` moves messages to other levels, ``undeliverable`` is about those that could not be
  delivered. Both take messages with its ``source`` and ``mover``.
"""
