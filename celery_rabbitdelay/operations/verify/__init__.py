"""``verify``: what on a broker breaks, or may break, the promises of the levels.

Read ``findings`` first: the table of all faults, and the report. ``checks`` has ``verify``, and a
function for each kind of fault; ``policies`` those about policies;
:mod:`celery_rabbitdelay.operations.permissions` has the one that asks over AMQP. ``management``
reads the broker. ``application`` calls ``verify`` for the broker and the workers of an application.
Nothing here publishes into the levels, takes a message out of a queue or changes anything.
"""
