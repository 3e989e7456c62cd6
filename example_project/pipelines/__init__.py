"""Pipelines in Spark around the shop's reminders; each is one file and one command.

``reminders`` sends them, ``forecast`` counts what is due when, ``lateness`` reports on what was
delivered, and ``reconciliation`` finds what is missing and sends it again. ``replay`` has the
options that they share, and ``delivered_log`` is what the worker writes for ``lateness``.
"""
