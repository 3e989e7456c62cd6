"""Metrics: counts and measurements of a process, for Prometheus.

The kernel and the other additions define their own instruments and record values with
``app.rabbitdelay.recorder``, which passes them on once metrics are in use.

Read ``instruments`` (a worker's own instruments, and the table of all instruments), ``collector``
(``app.rabbitdelay.metrics``), ``bootstep`` (serves a worker's metrics and health on a port) and
``probe`` (messages that show how late the levels are). ``reading`` caches readings of a server, for
the web page too.
"""
