"""URLs as logs, errors and reports may show them: without passwords. No other file hides passwords.

A URL in an error is often malformed. So whatever may be a password is hidden, even if more of the
URL is lost with it than need be.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

from kombu import Connection

__all__ = ["HIDDEN", "has_password", "shown_broker", "without_password", "without_passwords"]

#: What stands for a password, as in the texts of kombu and Celery.
HIDDEN: Final = "**"

#: URLs in a list of servers, such as ``sentinel://one;sentinel://two``, are separated by these.
_BETWEEN_SERVERS: Final = re.compile(r";(?=[A-Za-z][A-Za-z0-9+.-]*://)")

#: A parameter with its value, such as ``?password=...`` of a URL of Redis.
_PARAMETER: Final = re.compile(r"([?&])([^=&?]*)=([^&]*)")

#: What the name of a secret parameter contains.
_SECRET: Final = re.compile("pass|pwd|secret|token", re.IGNORECASE)

#: A URL within a text.
_IN_TEXT: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")


def without_password(url: str) -> str:
    """Return a URL, or several with ``;`` between them, without its passwords.

    Args:
        url: The URL. It may be malformed; a password may contain any character.
    """
    return ";".join(map(_of_server, _BETWEEN_SERVERS.split(url)))


def without_passwords(text: str) -> str:
    """Return a text without the passwords of the URLs in it."""
    return _IN_TEXT.sub(lambda found: without_password(found[0]), text)


def has_password(url: str) -> bool:
    """Return whether a URL contains what may be a password."""
    return without_password(url) != url


def shown_broker(connection: Connection) -> str:
    """Return the URL of a connection's broker without its password.

    Args:
        connection: The connection, whose own ``as_uri`` is not enough: an unquoted ``/`` in a
            password makes the rest of it the virtual host.
    """
    if "@" in (connection.virtual_host or ""):
        return f"{connection.transport_cls}://{HIDDEN}"
    return without_password(connection.as_uri())


def _of_server(url: str) -> str:
    url = _PARAMETER.sub(_of_parameter, url)
    scheme, slashes, rest = url.partition("://")
    if not slashes:
        # No URL, so its parts cannot be told apart.
        return f"{HIDDEN}@{url.rpartition('@')[2]}" if "@" in url else url
    # Unquoted, a password may contain "@", "/", "?" and "#".
    credentials, at, server = rest.rpartition("@")
    if at:
        user, colon, _ = credentials.partition(":")
        return f"{scheme}://{user}:{HIDDEN}@{server}" if colon else url
    host, colon, port = re.split("[/?#]", rest, maxsplit=1)[0].rpartition(":")
    if colon and not port.isdigit() and port and not port.endswith("]"):
        # The host was forgotten.
        return f"{scheme}://{host}:{HIDDEN}"
    return url


def _of_parameter(found: re.Match[str]) -> str:
    before, name, _ = found.groups()
    return f"{before}{name}={HIDDEN}" if _SECRET.search(unquote(name)) else found[0]
