"""Schedules: recurring tasks, without a scheduler process.

The message of a schedule's next instant waits in the levels. When it arrives, a worker publishes
the message of the following instant, waits for the confirm, and then runs the task. A schedule's
record in Redis holds the message to send, the waiting instant, and the arrivals that decided about
the latest instants.

Read ``recurrence`` (recurrences and occurrences, pure), ``lua/decide.lua`` (the rule that decides
on arrived messages) with ``record`` (the records), ``schedules`` (``app.rabbitdelay.schedules``:
put, pause, heal, ...), ``arrivals`` (in workers), ``beat`` and ``command``. The kernel, which
delays single tasks, does not use this package; the web page and ``verify`` do.
"""
