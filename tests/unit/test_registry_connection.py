"""Which URLs of Redis are taken; nothing here connects."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from celery_rabbitdelay.exceptions import InvalidSetting
from celery_rabbitdelay.registry.connection import connect
from tests.told import told

PASSWORD = "opensesame"

MASTER = {"master_name": "main"}


@pytest.mark.parametrize(
    "url",
    [
        *("redis://host", "redis://host:6380/3"),
        f"rediss://user:{PASSWORD}@host:6380/3?ssl_cert_reqs=none",
        *("unix:///run/redis.sock?db=3", "redis+socket:///run/redis.sock?virtual_host=3"),
        *("redis+cluster://host:6379", f"rediss+cluster://:{PASSWORD}@host:6379"),
        *("sentinel://host", f"sentinel://:{PASSWORD}@host:26379/3;sentinel://other:26379/3"),
        "sentinels://host:26379",
    ],
)
def test_each_kind_of_url_is_taken_without_connecting(url: str) -> None:
    store = connect(url, MASTER if url.startswith("sentinel") else None)
    assert store.is_cluster == ("cluster" in url)
    store.close()


@pytest.mark.parametrize(
    "url",
    [
        *("", "host", "host:6379", "amqp://host", f"amqp://user:{PASSWORD}@host", "redis"),
        *("redis:", "REDIS://host", "redis://host:port", "redis://host:99999", "redis://[::1"),
        *("redis://host?socket_timeout=long", f"redis://user:{PASSWORD}@host:port"),
        *(f"redis://:{PASSWORD}@[host", f"redis://:{PASSWORD}:{PASSWORD}@host:port"),
        *(f"redis://:{PASSWORD};{PASSWORD}@host:port", f"redis://:{PASSWORD}/{PASSWORD}@host:port"),
        f"redis://host:port?password={PASSWORD}",
        *("redis+socket:///run/redis.sock?virtual_host=first", "redis+cluster://host:port"),
        *(f"redis+cluster://:{PASSWORD}@host:port", "sentinel://host:port"),
        "sentinel://host:26379/first",
        f"sentinel://:{PASSWORD}@host:26379;sentinel://:{PASSWORD}2@other:port",
        *(f"redis://:{PASSWORD}/@host", f"redis://:{PASSWORD}\u2100@host"),
        f"redis://host:port?password=a@{PASSWORD}",
        f"rediss://:{PASSWORD}@host?ssl_cert_reqs=often",
    ],
)
def test_a_wrong_url_is_told_without_its_password(url: str) -> None:
    with pytest.raises(InvalidSetting) as raised:
        connect(url, MASTER if url.startswith("sentinel") else None)
    assert raised.value.key == "rabbitdelay_registry_url"
    assert PASSWORD not in told(raised.value)


def test_sentinel_needs_the_name_of_the_master() -> None:
    url = f"sentinel://:{PASSWORD}@host:26379;sentinel://:{PASSWORD}@other:26379"
    with pytest.raises(InvalidSetting, match="master_name") as raised:
        connect(url)
    assert PASSWORD not in str(raised.value)
    assert "other" in str(raised.value)


def arguments(url: str, **options: Any) -> dict[str, Any]:
    """Return the arguments of the connections that are made for a URL."""
    store = connect(url, options)
    try:
        found: dict[str, Any] = store.connect().connection_pool.connection_kwargs
        return found
    finally:
        store.close()


def test_sentinel_urls_say_user_password_and_database_of_the_master() -> None:
    url = "sentinel://me:p%40ss@host/3;sentinel://other/3"
    found = arguments(url, **MASTER)
    assert (found["username"], found["password"], found["db"]) == ("me", "p@ss", 3)


def test_a_socket_is_spelled_as_in_celery() -> None:
    found = arguments("redis+socket:///run/redis.sock?virtual_host=3")
    assert (found["path"], found["db"]) == ("/run/redis.sock", 3)


@pytest.mark.parametrize("url", ["redis://host", "sentinel://host"])
def test_no_call_is_repeated_behind_the_callers_back(url: str) -> None:
    found = arguments(url, **MASTER) if "sentinel" in url else arguments(url)
    assert found["retry"].get_retries() == 0
    assert (found["socket_timeout"], found["socket_connect_timeout"]) == (0.5, 0.5)


def test_options_are_handed_to_the_client() -> None:
    assert arguments("redis://host", socket_timeout=3, health_check_interval=7).items() >= {
        ("socket_timeout", 3),
        ("socket_connect_timeout", 3),
        ("health_check_interval", 7),
    }


@pytest.mark.parametrize("timeout", [None, 0, -1, "1"])
def test_an_answer_is_never_waited_for_without_end(timeout: Any) -> None:
    with pytest.raises(InvalidSetting, match="socket_timeout") as raised:
        connect("redis://host", {"socket_timeout": timeout})
    assert raised.value.key == "rabbitdelay_registry_options"


def test_it_says_which_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_redis(name: str, *arguments: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "redis":
            raise ImportError(name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without_redis)
    with pytest.raises(InvalidSetting, match=r"celery-rabbitdelay\[registry\]"):
        connect("redis://host")
