"""Messages that could not be delivered: read as copies, redriven, deleted.

Read ``messages`` (a copy of a message, which ones are meant, and their form in JSON), ``reader``
(reads the queue and keeps its order), ``redriving`` (what is published for a message) and
``redrive`` (where an application lets them go; publishes and removes), and ``application``, which
calls it with what belongs to an application.
"""
