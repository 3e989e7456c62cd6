"""Serve the page with uvicorn, for the command."""

from __future__ import annotations

import logging
from typing import Any

import celery
import uvicorn

from celery_rabbitdelay.exceptions import InvalidSetting
from celery_rabbitdelay.web.access import is_here
from celery_rabbitdelay.web.asgi import application_for
from celery_rabbitdelay.web.options import SETTING
from celery_rabbitdelay.web.site import Site


def serve(app: celery.Celery, host: str, port: int, **options: Any) -> None:
    """Serve the page until it is stopped by a signal.

    Args:
        app: The Celery application.
        host: The address to listen on.
        port: The port.
        **options: Options of :func:`celery_rabbitdelay.web.application`.

    Raises:
        InvalidSetting: An option is wrong, or the host is no address of this machine alone, and
            nobody is told from anybody else.
    """
    site = Site(app, options)
    if site.options.is_open and not is_here(host):
        takes = (
            "without users, the page is served on this machine alone (127.0.0.1, ::1, localhost), "
            "not on this host: set users, proxy_header or identify"
        )
        raise InvalidSetting(SETTING, host, takes)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        # Only the options say which proxy is trusted, so the client's own address is needed.
        uvicorn.run(
            application_for(site),
            host=host,
            port=port,
            proxy_headers=False,
            server_header=False,
            access_log=False,
            log_config=None,
        )
    finally:
        site.close()
