"""``celery rabbitdelay web``: serve the page that shows what waits."""

from __future__ import annotations

import logging
import sys

import click

from celery_rabbitdelay.command import shared
from celery_rabbitdelay.exceptions import InvalidSetting
from celery_rabbitdelay.operations.management import management_option
from celery_rabbitdelay.web.options import SETTING, hash_password


@shared.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=5556,
    show_default=True,
    help="The port; 0 for a free one.",
)
@management_option
@click.option(
    "--hash-password",
    "hashes",
    is_flag=True,
    help="Only print what rabbitdelay_web has for a password, which is asked for, or read from the "
    "standard input.",
)
def web(host: str, port: int, management: str | None, hashes: bool) -> None:
    """Serve a page that shows what waits, and lets operators act on it.

    The setting rabbitdelay_web says who may see it and act. Without it, only this machine may see
    it, and nobody may act.
    """
    delays = shared.delays()
    if hashes:
        _print_hash()
        return
    if shared.as_json():
        raise click.UsageError("--json prints one object: it is for --hash-password")
    try:
        import uvicorn

        from celery_rabbitdelay.web.access import is_here
        from celery_rabbitdelay.web.asgi import application_for
        from celery_rabbitdelay.web.site import Site
    except ImportError as missing:
        raise click.UsageError(
            f"the page needs {missing.name}: pip install 'celery-rabbitdelay[web]'"
        ) from missing
    with shared.usage_errors(InvalidSetting):
        site = Site(delays.app, {} if management is None else {"management": management})
        if site.options.is_open and not is_here(host):
            takes = (
                "without users, the page is served on this machine alone (127.0.0.1, ::1, "
                "localhost), not on this host: set users, proxy_header or identify"
            )
            raise InvalidSetting(SETTING, host, takes)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
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


def _print_hash() -> None:
    if sys.stdin.isatty():
        password = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    if not password:
        raise click.UsageError("the password is empty")
    hashed = hash_password(password)
    shared.answer({"password": hashed}, [hashed])
