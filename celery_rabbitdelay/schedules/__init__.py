"""Schedules: tasks that run again and again, without a process of their own.

The message of a schedule's next instant waits in the levels. When it arrives, a worker publishes
the message of the instant after it, waits for the confirm, and then runs the task. Redis notes for
each schedule what it sends, which instant waits, and which messages have decided the latest ones.

Read ``recurrence`` (when something is due, what a message says of its instant, and what follows
it, pure), ``lua/decide.lua`` (the rule: what becomes of a message) with ``record`` (what is noted),
``schedules`` (``app.rabbitdelay.schedules``: put, pause, heal, ...), ``arrivals`` (in workers),
``beat`` and ``command``. Nothing here is used by what delays a task; the page and ``verify`` read
it.
"""
