"""Spark pipelines for the shop's reminders; each is one file and one command.

``reminders`` sends the reminders, ``forecast`` counts the reminders that are due per minute,
``lateness`` reports how late they were delivered, and ``reconciliation`` sends missing ones again.
``replay`` has the options that they share. The worker imports ``delivered_log`` to write the log
that ``lateness`` reads.
"""
