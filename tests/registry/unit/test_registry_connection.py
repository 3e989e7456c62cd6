"""Which URLs of Redis are taken, and when it is asked again; nothing here connects."""

import sys
from typing import Any

import pytest

from celery_rabbitdelay.exceptions import InvalidSetting, RegistryUnavailable
from celery_rabbitdelay.registry.connection import connect
from celery_rabbitdelay.registry.registry import PAUSE, Breaker
from tests.kernel.unit.clock import Clock
from tests.told import told

PASSWORD = "opensesame"

MASTER = {"master_name": "main"}


def test_a_wrong_url_is_told_without_its_password() -> None:
    for url in (
        *("", "host:6379", f"amqp://user:{PASSWORD}@host", "redis", "redis://[::1"),
        *("redis://host:99999", "redis://host?socket_timeout=long"),
        *(f"redis://user:{PASSWORD}@host:port", f"redis://:{PASSWORD}@[host"),
        *(f"redis://:{PASSWORD};{PASSWORD}@host:port", f"redis://:{PASSWORD}/{PASSWORD}@host:port"),
        *(f"redis://host:port?password=a@{PASSWORD}", f"redis://:{PASSWORD}\u2100@host"),
        *("redis+socket:///run/redis.sock?virtual_host=first", "sentinel://host:26379/first"),
        f"redis+cluster://:{PASSWORD}@host:port",
        f"sentinel://:{PASSWORD}@host:26379;sentinel://:{PASSWORD}2@other:port",
        f"rediss://:{PASSWORD}@host?ssl_cert_reqs=often",
    ):
        with pytest.raises(InvalidSetting) as raised:
            connect(url, MASTER if url.startswith("sentinel") else None)
        assert raised.value.key == "rabbitdelay_registry_url"
        assert PASSWORD not in told(raised.value)
    url = f"sentinel://:{PASSWORD}@host:26379;sentinel://:{PASSWORD}@other:26379"
    with pytest.raises(InvalidSetting, match="master_name") as raised:
        connect(url)
    assert PASSWORD not in str(raised.value)


SENTINELS = "sentinel://me:p%40ss@host/3;sentinel://other/3"
LOGIN = {"username": "me", "password": "p@ss", "db": 3, "socket_timeout": 0.5}


@pytest.mark.parametrize(
    ("url", "options", "expected"),
    [
        (SENTINELS, MASTER, LOGIN),
        ("sentinels://host:26379", MASTER, {}),
        ("rediss://me:p%40ss@host:6380/3?ssl_cert_reqs=none", {}, LOGIN),
        # A socket is spelled as in Celery.
        ("redis+socket:///run/redis.sock?virtual_host=3", {}, {"path": "/run/redis.sock", "db": 3}),
        ("unix:///run/redis.sock?db=3", {}, {"path": "/run/redis.sock", "db": 3}),
        ("redis://host", {"socket_timeout": 3}, {"socket_timeout": 3, "socket_connect_timeout": 3}),
    ],
)
def test_url_and_options_say_how_to_connect_and_no_call_is_repeated(
    url: str, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Nothing is connected to."""
    store = connect(url, options)
    found = store.connect().connection_pool.connection_kwargs
    store.close()
    assert expected == {name: found[name] for name in expected}
    assert found["retry"]._retries == 0
    assert not store.is_cluster


def test_a_url_of_a_cluster_is_taken() -> None:
    store = connect(f"rediss+cluster://:{PASSWORD}@host:6379")
    assert store.is_cluster
    store.close()


def test_a_wrong_option_or_an_answer_without_an_end_is_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"socket_timeot": 1},
        *({"socket_timeout": each} for each in (None, 0, -1, "1")),
    ]
    for options in wrong:
        with pytest.raises(InvalidSetting, match="socket_timeo") as raised:
            connect("redis://host", options)
        assert raised.value.key == "rabbitdelay_registry_options"


def test_it_says_which_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(InvalidSetting, match=r"celery-rabbitdelay\[registry\]"):
        connect("redis://host")


def test_the_breaker_is_open_for_a_while_after_a_failure() -> None:
    clock, asked = Clock(1000), list[float]()
    breaker = Breaker(clock)

    def fail() -> None:
        asked.append(clock.now)
        raise RegistryUnavailable("away")

    while clock.now < 1000 + 3 * PAUSE:
        with pytest.raises(RegistryUnavailable):
            breaker.call(fail)
        assert breaker.is_open
        clock.now += PAUSE / 4
    assert asked == [1000, 1000 + PAUSE, 1000 + 2 * PAUSE]
    assert not breaker.is_open
    assert breaker.call(lambda: "answer") == "answer"
    assert not breaker.is_open
