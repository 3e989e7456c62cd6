"""What a process counts, for Prometheus and for OpenTelemetry.

``instruments`` is the table of all metrics; ``recording`` counts, and hands both systems what they
read. Neither ``prometheus_client`` nor OpenTelemetry is imported unless a process uses it. What
only a worker measures is in :mod:`celery_rabbitdelay.worker.metrics`.
"""
