"""Metrics: what a process counts and measures, for Prometheus and for OpenTelemetry.

The kernel and the other additions define their own instruments and record values by
``app.rabbitdelay.recorder``, which does nothing until metrics are in use. Everything behind that
lives here; nobody else imports it.

Read ``instruments`` (what only a worker that serves metrics measures, and the table of all
instruments), ``collector`` (``app.rabbitdelay.metrics``) and ``bootstep`` (a worker serves its
metrics and its health on a port).
"""

from __future__ import annotations

from typing import Final

import click

#: The option of ``celery worker`` that says on which port it serves its metrics.
PORT_OPTION: Final = click.Option(
    ["--rabbitdelay-metrics-port"],
    help="The port on which the worker serves metrics to Prometheus, or an address with a port; "
    "instead of the setting rabbitdelay_metrics_port. Empty for none.",
)
