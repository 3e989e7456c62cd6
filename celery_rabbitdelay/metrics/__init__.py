"""Metrics: what a process counts and measures, for Prometheus.

The kernel and the other additions define their own instruments and record values by
``app.rabbitdelay.recorder``, which does nothing until metrics are in use. Everything behind that
lives here.

Read ``instruments`` (what only a worker that serves metrics measures, and the table of all
instruments), ``collector`` (``app.rabbitdelay.metrics``), ``bootstep`` (a worker serves its
metrics and its health on a port) and ``probe`` (messages that show how late the levels are).
``reading`` caches a look at a server; the page uses it as well.
"""
