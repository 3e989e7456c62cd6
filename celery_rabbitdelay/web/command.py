"""``celery rabbitdelay web``: serve the page that shows what waits."""

from __future__ import annotations

import sys
from typing import Any

import click

from celery_rabbitdelay.command import shared
from celery_rabbitdelay.exceptions import InvalidSetting


@shared.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=5556,
    show_default=True,
    help="The port; 0 for a free one.",
)
@shared.management_option
@click.option(
    "--hash-password",
    is_flag=True,
    help="Only print what rabbitdelay_web has for a password, which is asked for, or read from the "
    "standard input.",
)
def web(host: str, port: int, management: str | None, hash_password: bool) -> None:
    """Serve a page that shows what waits, and lets operators act on it.

    The setting rabbitdelay_web says who may see it and act. Without it, only this machine may see
    it, and nobody may act.
    """
    delays = shared.delays()
    if hash_password:
        _print_hash()
        return
    if shared.as_json():
        raise click.UsageError("--json prints one object: it is for --hash-password")
    try:
        from celery_rabbitdelay.web.serve import serve  # an extra
    except ImportError as missing:
        raise click.UsageError(
            f"the page needs {missing.name}: pip install 'celery-rabbitdelay[web]'"
        ) from missing
    options: dict[str, Any] = {} if management is None else {"management": management}
    with shared.usage_errors(InvalidSetting):
        serve(delays.app, host, port, **options)


def _print_hash() -> None:
    from celery_rabbitdelay.web.passwords import hash_password

    if sys.stdin.isatty():
        password = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    if not password:
        raise click.UsageError("the password is empty")
    hashed = hash_password(password)
    shared.answer({"password": hashed}, [hashed])
