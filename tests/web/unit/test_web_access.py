"""Who may see the page and act on it, and what else is refused."""

import base64
import logging
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI

from celery_rabbitdelay import Celery
from celery_rabbitdelay.exceptions import InvalidSetting
from celery_rabbitdelay.web import User, application
from celery_rabbitdelay.web.options import hash_of
from celery_rabbitdelay.web.site import Works
from tests.browser import Browser, assert_harmless, read

#: What an action answers that was let through: nothing of that key goes on.
LET_THROUGH = 404

USERS = {
    "ada": {"password": hash_of("ada's word"), "role": "operator"},
    "vera": {"password": hash_of("vera's word")},
    "J\u00fcrgen": {"password": hash_of("pass:w\u00f6rd \U0001f407")},
}

ADA = ("ada", "ada's word")

Make = Callable[..., Any]


@pytest.fixture
def make() -> Any:
    """Makes the page of an application whose broker is away."""

    def make(**options: Any) -> Any:
        app = Celery("shop", broker="amqp://guest:guest@127.0.0.1:1//", set_as_current=False)
        return application(app, **options)

    return make


def stop(browser: Browser, headers: dict[str, str] | None = None) -> int:
    """Try an action; return the status of the answer."""
    return browser.ask(
        "POST", "/work/stop", data={"key": "none"}, headers=headers or {}
    ).status_code


def user_of(browser: Browser) -> str:
    """Return who the page says that one is."""
    return read(browser.get("/work").text).text


def test_without_users_only_this_machine_is_answered_and_not_through_a_proxy(make: Make) -> None:
    web = make()
    for client in ("127.0.0.1", "::1"):
        assert Browser(web, client=client).get("/work").status_code == 200
    for other in ("10.0.0.5", "::ffff:10.0.0.5", None):
        assert Browser(web, client=other).get("/work").status_code == 403, other
    for header in ("Forwarded", "X-Forwarded-For", "X-Forwarded-Prefix", "Via", "X-Real-IP"):
        assert Browser(web, headers={header: "127.0.0.1"}).get("/work").status_code == 403, header


def test_a_foreign_name_that_points_to_this_machine_is_refused(make: Make) -> None:
    browser, named = Browser(make()), Browser(make(hosts=["tasks.example"]))
    for host in ("LOCALHOST:5556", "127.0.0.1:5556", "[::1]:5556"):
        assert browser.get("/work", headers={"Host": host}).status_code == 200, host
    for host in ("evil.example:5556", "localhost.evil.example", "10.0.0.1", "", "[", "[::2]"):
        answer = browser.get("/work", headers={"Host": host})
        assert answer.status_code == 421, host
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert named.get("/work", headers={"Host": "Tasks.Example:443"}).status_code == 200
    assert named.get("/work", headers={"Host": "localhost"}).status_code == 421


def test_an_operator_acts_and_a_viewer_only_reads(make: Make) -> None:
    web = make(users=USERS)
    for name, role, status in (("ada", "operator", LET_THROUGH), ("vera", "viewer", 403)):
        browser = Browser(web, "http://tasks.example", "10.0.0.5", auth=(name, f"{name}'s word"))
        assert f"{name}, {role}" in user_of(browser)
        assert f"{name}, {role}" in read(browser.get("/nowhere").text).text
        assert stop(browser) == status
    assert stop(Browser(make())) == 403, "nobody acts without users, unless it is configured"
    assert stop(Browser(make(loopback_role="operator"))) == LET_THROUGH


def test_a_wrong_name_or_password_is_refused_and_asked_for(make: Make) -> None:
    web = make(users=USERS)
    for auth in (None, ("ada", "vera's word"), ("nobody", "ada's word"), ("ada", ""), ("", "")):
        for path in ("/work", "/api/work"):
            answer = Browser(web, auth=auth).get(path)
            assert answer.status_code == 401, auth
            challenge = 'Basic realm="celery_rabbitdelay", charset="UTF-8"'
            assert answer.headers["WWW-Authenticate"] == challenge
        wrong = "Name or password is wrong." if auth else "Sign in with your name and password."
        assert answer.json() == {"error": wrong}
        assert stop(Browser(web, auth=auth)) == 401


def test_any_name_and_password_can_be_sent_and_what_is_malformed_is_refused(make: Make) -> None:
    web = make(users=USERS)
    known = "J\u00fcrgen:pass:w\u00f6rd \U0001f407"
    assert "J\u00fcrgen, viewer" in user_of(Browser(web, auth=("J\u00fcrgen", known[7:])))

    def encoded(text: str, encoding: str = "utf-8") -> str:
        return base64.b64encode(text.encode(encoding)).decode()

    for header, status in (
        (f"bAsIc {encoded(known)}", 200),
        (f"Basic {encoded(known, 'utf-16')}", 401),
        (f"Basic {encoded('ada')}", 401),
        (f"Bearer {encoded(known)}", 401),
        (f"Basic {known.encode().hex()}", 401),
        (f"Basic {encoded(known)}!", 401),
        ("Basic \u00fc", 401),
        ("Basic", 401),
        ("", 401),
    ):
        answer = Browser(web).ask("GET", "/work", headers=[("Authorization", header.encode())])
        assert answer.status_code == status, header


def test_a_change_of_the_users_counts_at_once(make: Make) -> None:
    users = dict(USERS)
    ada = Browser(make(users=users), auth=ADA)
    assert "ada, operator" in user_of(ada)
    users["ada"] = {"password": USERS["ada"]["password"]}
    assert "ada, viewer" in user_of(ada)
    users["ada"] = USERS["vera"]
    assert ada.get("/work").status_code == 401
    del users["ada"]
    assert ada.get("/work").status_code == 401


def test_a_form_of_another_site_is_refused(make: Make) -> None:
    browser = Browser(make(users=USERS), "http://tasks.example:5556", auth=ADA)
    for headers, status in (
        ({}, LET_THROUGH),
        ({"Origin": "http://tasks.example:5556"}, LET_THROUGH),
        ({"Origin": "https://TASKS.example:5556"}, LET_THROUGH),
        ({"Origin": "http://tasks.example"}, 403),
        ({"Origin": "http://tasks.example:5557"}, 403),
        ({"Origin": "http://other.tasks.example:5556"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "none"}, LET_THROUGH),
        ({"Sec-Fetch-Site": "same-origin"}, LET_THROUGH),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://behind.example"}, LET_THROUGH),
        ({"Sec-Fetch-Site": "same-site", "Origin": "http://tasks.example:5556"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": ""}, 403),
    ):
        assert stop(browser, headers) == status, headers
        assert browser.get("/work", headers=headers).status_code == 200, "a link leads here"


def test_an_action_takes_a_form_and_nothing_else(make: Make) -> None:
    browser = Browser(make(loopback_role="operator"))
    for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS"):
        answer = browser.ask(method, "/work/stop?key=x")
        assert answer.status_code == 405
    form = "application/x-www-form-urlencoded"
    for kind, body, status in (
        ("application/json", b'{"key": "x"}', 415),
        (form, b"a=" + b"b" * 2**20, 413),
        (form, b"a=b&" * 3000, 400),
        (form, b"a=%FF", 400),
    ):
        headers = {"Content-Type": kind}
        answer = browser.ask("POST", "/work/stop", content=body, headers=headers)
        assert answer.status_code == status, (kind, body[:10])


def test_a_trusted_proxy_names_the_user_and_nobody_else(make: Make) -> None:
    networks = ["10.0.0.5", "10.1.0.0/16", "fd00::/8"]
    web = make(proxy_header="X-Remote-User", proxies=networks, operators=["ada"])
    for address in ("10.0.0.5", "10.1.2.3", "::ffff:10.0.0.5", "fd00::1"):
        for name, status in (("ada", LET_THROUGH), ("vera", 403)):
            browser = Browser(web, "http://tasks.example", address, {"X-Remote-User": name})
            assert f"{name}, {'operator' if name == 'ada' else 'viewer'}" in user_of(browser)
            assert stop(browser) == status
    others = ("10.0.0.6", "127.0.0.1", "::1", "not an address", None)
    refused: list[tuple[str | None, list[str]]] = [(each, ["ada"]) for each in others]
    refused += [("10.0.0.5", names) for names in ([], ["  "], ["ada", "vera"])]
    for client, names in refused:
        headers = [("Host", "localhost"), *(("X-Remote-User", each) for each in names)]
        answer = Browser(web, client=client).ask("GET", "/work", headers=headers)
        assert answer.status_code == 403, (client, names)


def test_a_function_of_the_application_s_names_the_user(make: Make) -> None:
    def identify(scope: Any) -> Any:
        name = dict(scope["headers"]).get(b"x-name", b"").decode()
        if name == "broken":
            raise LookupError("the database of users is away")
        return {"ada": User("ada", "operator"), "vera": User("vera"), "odd": "ada"}.get(name)

    web = make(identify=identify)
    for name, status in (("ada", LET_THROUGH), ("vera", 403)):
        assert stop(Browser(web, client="10.0.0.5", headers={"X-Name": name})) == status
    for name in ("nobody", "odd", "broken"):
        assert Browser(web, headers={"X-Name": name}).get("/work").status_code == 403


def test_a_path_leads_to_no_other_host_and_the_bare_one_to_the_first_page(make: Make) -> None:
    web, outer = make(users=USERS), FastAPI()
    outer.mount("/ops", web)
    for base, served in (("", web), ("/ops", outer)):
        for path in ("/now/?x=1", "//evil.example/x/", "//evil.example/now"):
            answer = Browser(served).get(f"http://localhost{base}{path}")
            assert (answer.status_code, answer.headers.get("Location")) == (404, None), path
        first = Browser(served).get(f"http://localhost{base}/")
        assert (first.status_code, first.headers["Location"]) == (303, f"{base}/now")


def test_every_answer_forbids_foreign_scripts_frames_and_copies(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Works, "all", lambda self: 1 / 0)
    browser = Browser(make(loopback_role="operator"))
    broken = browser.get("/api/work")
    assert (broken.status_code, "ZeroDivisionError" in broken.text) == (500, False)
    for path in ("/", "/now", "/work", "/nope", "/static/style.css", "/api/work", "/api/x"):
        answer = browser.get(path)
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Referrer-Policy"] == "same-origin", "else a form's Origin is null"
        assert "Access-Control-Allow-Origin" not in answer.headers
        if answer.headers.get("Content-Type", "").startswith("text/html"):
            assert_harmless(answer.text)


def test_a_wrong_password_stands_in_the_log(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    web = make(users=USERS)
    with caplog.at_level(logging.INFO, "celery_rabbitdelay.web"):
        for auth in (ADA, ("eve\nada has acted", "guess of a word")):
            Browser(web, auth=auth).get("/work")
    logged = [each for each in caplog.records if each.name.startswith("celery_rabbitdelay.web")]
    assert [each.getMessage() for each in logged] == [
        "rabbitdelay web: wrong password for 'eve\\nada has acted' from 127.0.0.1",
    ]


def test_a_wrong_option_says_what_it_takes_and_not_its_value(make: Make) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"user": {}}, "the options are users, proxy_header"),
        ({"users": {}}, "at least one user"),
        ({"users": {"ada": {"password": "secret word"}}}, "is not hashed"),
        ({"users": {"ada": {"password": f"{hash_of('secret word')}\n"}}}, "is not hashed"),
        ({"users": {"ada": {}}}, "is not hashed"),
        ({"users": {"ada": {**USERS["ada"], "role": "admin"}}}, "takes one of viewer, operator"),
        ({"users": USERS, "identify": print}, "only one of users, proxy_header and identify"),
        ({"proxies": ["10.0.0.1"]}, "set both proxy_header and proxies"),
        ({"proxy_header": "X-User", "proxies": ["here"]}, "takes addresses and networks"),
        ({"users": {"ada:b": USERS["ada"]}}, "the name 'ada:b' has a colon"),
        ({"secret": "secret word"}, "no such option"),
    ]
    for options, says in wrong:
        with pytest.raises(InvalidSetting) as raised:
            make(**options)
        assert says in str(raised.value)
        assert "secret word" not in str(raised.value)
