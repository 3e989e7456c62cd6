"""``celery rabbitdelay web``: serve the web page."""

from __future__ import annotations

import logging
import secrets

import click

from celery_rabbitdelay.command import shared
from celery_rabbitdelay.exceptions import InvalidSetting
from celery_rabbitdelay.operations.management import management_option
from celery_rabbitdelay.web.options import SETTING, hash_of


@shared.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=5556,
    show_default=True,
    help="The port to listen on; 0 picks a free port.",
)
@management_option
@click.option(
    "--new-password",
    "is_new",
    is_flag=True,
    help="Make a password for a user in rabbitdelay_web, print it and its hash, then exit.",
)
def web(host: str, port: int, management: str | None, is_new: bool) -> None:
    """Serve a web page that shows waiting tasks and lets operators act on them.

    The setting rabbitdelay_web defines viewers and operators. Without the setting, the page is
    read-only, and serves only this machine.
    """
    delays = shared.delays()
    if is_new:
        password = secrets.token_urlsafe(18)
        found = {"password": password, "hash": hash_of(password)}
        shared.answer(found, (f"{name:8}  {text}" for name, text in found.items()))
        return
    if shared.as_json():
        raise click.UsageError("--json is only for --new-password: a server prints no object")
    try:
        import uvicorn

        from celery_rabbitdelay.web.access import is_here
        from celery_rabbitdelay.web.asgi import Server
        from celery_rabbitdelay.web.site import Site
    except ImportError as missing:
        raise click.UsageError(
            f"the page needs {missing.name}: pip install 'celery-rabbitdelay[web]'"
        ) from missing
    with shared.usage_errors(InvalidSetting):
        site = Site(delays.app, {} if management is None else {"management": management})
        if site.options.is_open and not is_here(host):
            takes = (
                "without one of users, proxy_header and identify, the page listens on this "
                "machine's loopback only: 127.0.0.1, ::1 or localhost"
            )
            raise InvalidSetting(SETTING, host, takes)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # Our options list the trusted proxies, so uvicorn must not replace the peer's address.
    uvicorn.run(
        Server(site).application(),
        host=host,
        port=port,
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_config=None,
    )
