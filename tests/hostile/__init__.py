"""A hostile client: messages that are malformed, oversized or forged, and what becomes of each.

``python -m tests.hostile`` publishes 100,000 of them, byte by byte, while an honest client sends
tasks to the same worker. ``fields`` writes AMQP's field values, ``kinds`` is the table of what is
published, ``malformed`` the tasks among it, ``campaign`` publishes and accounts for every message.
"""
