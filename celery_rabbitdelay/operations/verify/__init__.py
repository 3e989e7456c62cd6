"""``verify``: what on a broker breaks, or may break, the promises of the levels.

Read ``findings`` first: the table of all faults, and the report. ``checks`` has ``verify``, the
only function that others call, and a function for each kind of fault; ``policies`` those about
policies; :mod:`celery_rabbitdelay.operations.permissions` has the one that asks over AMQP.
``management`` reads the broker. Nothing here publishes into the levels, takes a message out of a
queue or changes anything.
"""
