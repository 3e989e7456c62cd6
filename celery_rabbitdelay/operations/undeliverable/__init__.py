"""Messages that could not be delivered: read as copies, redriven, deleted.

Read ``messages`` (a copy of a message, which ones are meant, and their form in JSON), ``redriving``
(what is published for a message), ``redrive`` (where an application lets them go; publishes or
deletes them), and ``application``, which calls it with what belongs to an application.
"""
