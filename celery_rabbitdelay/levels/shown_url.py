"""URLs without passwords, for logs, errors and reports. No other file hides passwords.

A URL in an error is often malformed. So every part that may be a password is hidden, even if other
parts of the URL are hidden with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote

from kombu import Connection

#: Replaces a password, as in the output of kombu and Celery.
HIDDEN: Final = "**"

#: The beginning of a URL. A password may contain "://", too.
_SCHEME: Final = r"[A-Za-z][A-Za-z0-9+.-]*://"

#: The separator in a list of URLs, such as ``sentinel://one;sentinel://two``.
_BETWEEN_SERVERS: Final = re.compile(f";(?={_SCHEME})")

#: A parameter of a URL with its value, such as ``?password=...``.
_PARAMETER: Final = re.compile(r"(?P<start>[?&](?P<name>[^=&?]*)=)(?P<value>[^&]*)")

#: The name of a secret parameter contains one of these words.
_SECRET: Final = re.compile("pass|pwd|secret|token", re.IGNORECASE)

#: A URL within a text. The password after "user:" may have blanks up to the next "@" of the line;
#: but if a port or only punctuation follows the colon, the URL ends and ordinary text begins.
_IN_TEXT: Final = re.compile(
    rf"{_SCHEME}"
    r"(?:[^\s@:/?#\[\]]*:(?!\d+\b|[^\s\w]*\s)(?:(?!://)[^@\n]){1,200}@)?\S+"
)


def without_password(url: str) -> str:
    """Return a URL, or a list of URLs with ``;`` between them, without passwords.

    Args:
        url: The URL. The URL may be malformed; a password may contain any character.
    """
    has_scheme = re.match(_SCHEME, url) is not None
    if has_scheme and len(servers := _BETWEEN_SERVERS.split(url)) > 1:
        return ";".join(map(without_password, servers))
    secrets = [each for each in _PARAMETER.finditer(url) if _is_secret(each)]
    is_ambiguous = any("@" in each["value"] for each in secrets)
    url = _PARAMETER.sub(_of_parameter, url)
    scheme, slashes, rest = url.partition("://") if has_scheme else (url, "", "")
    if is_ambiguous:
        # The text before "@" may belong to a parameter or to a password: hide all of it.
        return f"{scheme}://{HIDDEN}" if slashes else HIDDEN
    if not slashes:
        return f"{HIDDEN}@{url.rpartition('@')[2]}" if "@" in url else url
    # Unquoted, a password may contain "@", "/", "?" and "#".
    credentials, at, server = rest.rpartition("@")
    if at:
        user, colon, _ = credentials.partition(":")
        return f"{scheme}://{user}:{HIDDEN}@{server}" if colon else url
    host, colon, port = re.split("[/?#]", rest, maxsplit=1)[0].rpartition(":")
    if colon and port and not port.isdigit() and not port.endswith("]"):
        # The text after the colon is not a port, but the password of a URL without a host.
        return f"{scheme}://{host}:{HIDDEN}"
    return url


def without_passwords(text: str) -> str:
    """Return a text without the passwords of the URLs in it."""
    return _IN_TEXT.sub(lambda found: without_password(found[0]), text)


def without_passwords_in(value: object) -> object:
    """Return settings without their passwords, at any depth of mappings and lists.

    Args:
        value: A text, with or without a URL; a mapping, in which texts under names such as
            "password" are hidden; or a list or a tuple. Other values are returned unchanged.
    """
    if isinstance(value, str):
        return without_password(value) if "://" in value else value
    if isinstance(value, Mapping):
        return {
            name: HIDDEN
            if isinstance(each, str) and isinstance(name, str) and _SECRET.search(name)
            else without_passwords_in(each)
            for name, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_passwords_in(each) for each in value]
    return value


def shown_broker(connection: Connection) -> str:
    """Return the URL of a connection's broker without its password.

    Args:
        connection: The connection. Kombu's ``as_uri`` alone is not safe: it mistakes the end of a
            password with an unquoted "/" for the virtual host, and a URL without "://" for the
            host.
    """
    if "@" in f"{connection.hostname}{connection.virtual_host}":
        return f"{connection.transport_cls}://{HIDDEN}"
    return without_password(connection.as_uri())


def _is_secret(parameter: re.Match[str]) -> bool:
    return _SECRET.search(unquote(parameter["name"])) is not None


def _of_parameter(parameter: re.Match[str]) -> str:
    return f"{parameter['start']}{HIDDEN}" if _is_secret(parameter) else parameter[0]
