"""URLs are shown without passwords, whatever is wrong with them."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kombu import Connection

from celery_rabbitdelay.app.settings import read_settings
from celery_rabbitdelay.exceptions import InvalidSetting
from celery_rabbitdelay.levels import shown_url
from tests.told import told

#: A part of each password; no error and no ``repr`` contains it.
PLANTED = "opensesame"

#: Passwords of all kinds of characters, most of them those that mean something in a URL.
passwords = st.builds(
    lambda before, after: f"{before}{PLANTED}{after}",
    st.text(st.one_of(st.sampled_from("@:/?#&;=%[] pas"), st.characters(codec="utf-8"))),
    st.text(st.one_of(st.sampled_from("@:/?#&;=%[] pas"), st.characters(codec="utf-8"))),
)

#: What an application may be given as a URL.
TEMPLATES = [
    *("amqp://user:{}@host:5672//", "amqps://user:{}@host/vhost"),
    "redis://:{}@host:6379/0?socket_timeout=2",
    *("sentinel://one:26379;sentinel://:{}@two:26379/0", "amqp://user:good@one;amqp://user:{}@two"),
    *("http://monitor:{}@host:15672/prefix", "redis:/:{}@host", "user:{}@host"),
]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqp://guest:secret@host:5672//", "amqp://guest:**@host:5672//"),
        ("redis://:secret@host/0", "redis://:**@host/0"),
        ("redis://host/0?password=secret&db=1", "redis://host/0?password=**&db=1"),
        ("rediss://host?ssl_password=secret", "rediss://host?ssl_password=**"),
        ("redis://host?pass%77ord=secret", "redis://host?pass%77ord=**"),
        ("redis://host?password=se@cret", "redis://**"),
        (
            "http://host?PWD=a&client_secret=b&token=c",
            "http://host?PWD=**&client_secret=**&token=**",
        ),
        ("sentinel://:a@one;sentinel://:b@two/0", "sentinel://:**@one;sentinel://:**@two/0"),
        ("amqp://user:se/c?r#e@t@host", "amqp://user:**@host"),
        ("redis://:s3cret/0", "redis://:**"),
        ("http:/user:secret@host", "**@host"),
        ("secret@host", "**@host"),
    ],
)
def test_a_password_is_hidden(url: str, shown: str) -> None:
    assert shown_url.without_password(url) == shown
    assert shown_url.without_password(shown) == shown


WITHOUT = ["redis://host:6379/0", "redis://host:6379:", "redis://[::1]:6379", "amqp://user@host"]


@pytest.mark.parametrize(
    "url",
    [
        *("", "amqp://", "amqp://user@host:5672/vhost", "redis://host:6379/0?socket_timeout=2"),
        *("rediss://host?ssl_keyfile=/etc/key.pem", "redis://[::1]:6379/0", "redis://[::1]/0"),
        *("redis://:6379", "unix:///run/redis.sock?db=3", "amqp://user@one;amqp://user@two"),
    ],
)
def test_what_has_no_password_is_shown_as_it_is(url: str) -> None:
    assert shown_url.without_password(url) == url


@pytest.mark.parametrize("template", TEMPLATES)
@given(password=passwords)
@example(password=f"12/{PLANTED}?pass=word")
@example(password=f"a@b/{PLANTED}?token=c")
@example(password=f"{PLANTED}://")
@example(password=f"{PLANTED};a://")
def test_no_character_of_a_password_makes_it_visible(template: str, password: str) -> None:
    assert PLANTED not in shown_url.without_password(template.format(password))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            f"'amqp://a:{PLANTED}@one' and redis://:{PLANTED}@two/0 of celery@host",
            "'amqp://a:**@one' and redis://:**@two/0 of celery@host",
        ),
        # A password may have blanks.
        ("redis://u:a b@h/0 is away", "redis://u:**@h/0 is away"),
        ("redis://:a b c@h and amqp://u:d e@i", "redis://:**@h and amqp://u:**@i"),
        ("amqp://u:1st b@h", "amqp://u:**@h"),
        # What follows a URL is shown.
        *((text, text) for text in [f"{url} of celery@host" for url in WITHOUT]),
    ],
)
def test_in_a_text_each_url_loses_its_password(text: str, shown: str) -> None:
    assert shown_url.without_passwords(text) == shown


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqp://guest:secret@host:5672//", "amqp://guest:**@host:5672//"),
        # kombu takes the end of such a password for the virtual host.
        ("amqp://guest:12/cret@host", "amqp://**"),
    ],
)
def test_a_connection_is_shown_without_its_password(url: str, shown: str) -> None:
    assert shown_url.shown_broker(Connection(url)) == shown


def test_a_setting_that_is_refused_is_told_without_a_password() -> None:
    with pytest.raises(InvalidSetting) as refused:
        read_settings({"rabbitdelay_registry_uri": f"redis://:{PLANTED}@host"})
    # Lines of source code, which a traceback has, are this file's own.
    lines = told(refused.value).splitlines()
    assert PLANTED not in "".join(line for line in lines if "PLANTED" not in line)


def test_settings_lose_the_passwords_that_are_deep_in_them() -> None:
    hosts = [("two", f"redis://:{PLANTED}@two"), {"password": PLANTED, "port": 6379}]
    shown = [["two", "redis://:**@two"], {"password": "**", "port": 6379}]
    assert shown_url.without_passwords_in({"hosts": hosts}) == {"hosts": shown}
