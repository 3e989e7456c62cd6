"""``verify``: what on a broker breaks, or may break, the promises of the levels.

Read ``verification`` (the only function that others call), then ``finding`` (its result) and
``application`` (what is expected). ``management_api`` and ``inventory`` read the broker over HTTP,
``amqp_probes`` over AMQP. Everything else is pure: each file checks one thing in an inventory.
Nothing here publishes into the levels, takes a message out of a queue or deletes anything.
"""
