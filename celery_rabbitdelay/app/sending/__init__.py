"""Sending a delayed task, one or many: from what a user calls to the publisher.

For one, read ``task_sending`` (where a task goes) and ``task_producer`` (the producer that Celery
publishes with). For many, read ``send_many`` with ``rows``, ``grouping``, ``row_registration``,
``task_messages`` and ``message_template``.
"""
