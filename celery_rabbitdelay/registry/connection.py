"""Connections to Redis: one server, Sentinel or Cluster. No other file imports redis-py."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from celery_rabbitdelay.exceptions import InvalidSetting
from celery_rabbitdelay.levels.shown_url import without_password
from celery_rabbitdelay.registry.store import Store

#: The schemes of the URLs that the setting takes.
SCHEMES: Final = (
    "redis",
    "rediss",
    "unix",
    "redis+socket",
    "sentinel",
    "sentinels",
    "redis+cluster",
    "rediss+cluster",
)

#: The values that the setting takes, for errors.
TAKES_URL: Final = (
    f"a URL that begins with one of {', '.join(SCHEMES)}; its database is a whole number"
)

SETTING: Final = "rabbitdelay_registry_url"
OPTIONS: Final = "rabbitdelay_registry_options"

#: The default timeout in seconds, for connecting and for every answer.
TIMEOUT: Final = 0.5


def is_redis_url(url: object) -> bool:
    """Return whether a string is a URL that :func:`connect` takes, without importing a client."""
    return isinstance(url, str) and all(map(_is_url_of_one, url.split(";")))


def _is_url_of_one(url: str) -> bool:
    with suppress(ValueError):
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError unless it is a number
        # redis-py reads a database that is not a number as 0.
        path = ".*[^/].*" if parts.scheme in ("unix", "redis+socket") else "/?[0-9]*"
        return parts.scheme in SCHEMES and re.fullmatch(path, parts.path) is not None
    return False


def connect(url: str, options: Mapping[str, Any] | None = None) -> Store:
    """Return a store that connects when it is first used.

    Args:
        url: The URL, as for Celery's result backend: ``redis://``, ``rediss://``, ``unix://`` or
            ``redis+socket://``, ``sentinel://host:26379;sentinel://host2:26379/0``; or
            ``redis+cluster://host:6379`` with any server of a cluster.
        options: Other arguments of redis-py's client; for Sentinel, also ``master_name`` and
            ``sentinel_kwargs``, as in ``result_backend_transport_options``. ``socket_timeout`` is
            :data:`TIMEOUT` by default, and also limits the time for connecting.

    Raises:
        InvalidSetting: The URL or an option is invalid, or the package ``redis`` is missing.
    """
    invalid_url = partial(InvalidSetting, SETTING, without_password(url))
    scheme = url.partition("://")[0]
    try:
        import redis  # an extra
    except ImportError as missing:
        takes = "takes the package redis: pip install 'celery-rabbitdelay[registry]'"
        raise invalid_url(takes) from missing
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisClusterException
    from redis.retry import Retry

    options = options or {}
    timeout = options.get("socket_timeout", TIMEOUT)
    if not isinstance(timeout, int | float) or timeout <= 0:
        takes = "takes a positive number of seconds as its socket_timeout"
        raise InvalidSetting(OPTIONS, f"socket_timeout = {timeout!r}", takes)
    given: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "decode_responses": True,
        # The id of a task may hold half of a surrogate pair; see index.py.
        "encoding_errors": "surrogatepass",
        # By default, redis-py retries for seconds, and runs a script twice if its answer is lost.
        "retry": Retry(NoBackoff(), 0),
        **options,
    }
    if scheme.startswith("sentinel") and not given.get("master_name"):
        raise invalid_url("needs rabbitdelay_registry_options = {'master_name': ...}")
    # UnicodeDecodeError: another program has written bytes into a record.
    errors = (redis.RedisError, RedisClusterException, OSError, UnicodeDecodeError)
    try:
        with suppress(ValueError, redis.RedisError):
            client = _client_of(scheme, url, given)
            read_only = redis.exceptions.ReadOnlyError
            return Store(client, scheme.endswith("+cluster"), errors, read_only)
    except TypeError as wrong:
        raise InvalidSetting(OPTIONS, ", ".join(options), f"{wrong}") from wrong
    # Drop the cause, because urllib's error about a port or a host may quote the password.
    raise invalid_url(f"its host, port, database or a parameter is invalid: takes {TAKES_URL}")


def _client_of(scheme: str, url: str, given: dict[str, Any]) -> Callable[[], Any]:
    """Return a function that makes a client.

    Raises:
        TypeError: redis-py does not take an option.
        ValueError: The URL is invalid.
    """
    from redis import Redis  # an extra
    from redis.cluster import RedisCluster
    from redis.connection import parse_url

    if scheme.endswith("+cluster"):
        url = url.replace("+cluster", "", 1)
        parse_url(url)  # type: ignore[no-untyped-call]
        # The client is made later, because a new client asks the cluster for its servers at once.
        return partial(RedisCluster.from_url, url, **given)
    if scheme == "redis+socket":
        # In Celery's URL, the database is called virtual_host, as in kombu.
        url = url.replace("redis+socket", "unix", 1).replace("virtual_host=", "db=")
    is_behind_sentinel = scheme.startswith("sentinel")
    make = _behind_sentinel if is_behind_sentinel else Redis.from_url
    make(url, **given).connection_pool.make_connection()  # checks the options, and does not connect
    return partial(make, url, **given)


def _behind_sentinel(url: str, **given: Any) -> Any:
    from redis.sentinel import Sentinel  # an extra

    parts = [urlsplit(each) for each in url.split(";")]
    master = given.pop("master_name")
    own = given.pop("sentinel_kwargs", {})
    first = parts[0]
    if first.scheme == "sentinels":
        given.setdefault("ssl", True)
    if first.password:
        given.setdefault("password", unquote(first.password))
    if first.username:
        given.setdefault("username", unquote(first.username))
    database = first.path.strip("/") or parts[-1].path.strip("/")
    sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
        [(part.hostname or "localhost", part.port or 26379) for part in parts],
        sentinel_kwargs={
            "socket_timeout": given["socket_timeout"],
            "socket_connect_timeout": given["socket_connect_timeout"],
            "retry": given["retry"],
            **own,
        },
        **given,
    )
    return sentinel.master_for(master, db=int(database or 0))
