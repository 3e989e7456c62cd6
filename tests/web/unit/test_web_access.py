"""Who may see the page and act on it, and what else is refused."""

import asyncio
import logging
import time
from collections.abc import Callable
from threading import Event
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from celery_rabbitdelay import Celery
from celery_rabbitdelay.exceptions import InvalidSetting
from celery_rabbitdelay.web import User, application
from celery_rabbitdelay.web.access import COOKIE, KNOWN_COOKIE, MOST_WRONG, PAUSE, Session, Sessions
from celery_rabbitdelay.web.site import Works
from tests.browser import Browser, Form, assert_harmless, quick_hash
from tests.kernel.unit.clock import Clock

#: What an action answers that was let through: nothing of that key goes on.
LET_THROUGH = 404

SECRET = "s" * 32

HASHES = {name: quick_hash(f"{name}'s word") for name in ("ada", "vera")}

USERS = {
    "ada": {"password": HASHES["ada"], "role": "operator"},
    "vera": {"password": HASHES["vera"]},
}

Make = Callable[..., Any]


@pytest.fixture
def make() -> Any:
    """Makes the page of an application whose broker is away."""

    def make(**options: Any) -> Any:
        app = Celery("shop", broker="amqp://guest:guest@127.0.0.1:1//", set_as_current=False)
        return application(app, **options)

    return make


def stop(browser: Browser, **options: Any) -> int:
    """Try an action; return the status of the answer."""
    token = options.pop("token", None)
    data = {"key": "none", "token": browser.token if token is None else token}
    return browser.ask("POST", "/work/stop", data=data, **options).status_code


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
    for name, status in (("ada", LET_THROUGH), ("vera", 403)):
        browser = Browser(web, "http://tasks.example", "10.0.0.5")
        assert browser.get("/work").status_code == 401
        assert browser.get("/api/work").json() == {"error": "Sign in first."}
        signed_in = browser.sign_in(name, f"{name}'s word")
        assert (signed_in.status_code, signed_in.headers["Location"]) == (303, "/now")
        assert browser.get("/work").status_code == 200
        assert browser.json("/session")["user"] == name
        assert stop(browser) == status
    assert stop(Browser(make())) == 403, "nobody acts without users, unless it is configured"
    assert stop(Browser(make(loopback_role="operator"))) == LET_THROUGH


def test_a_wrong_name_or_password_is_refused(make: Make) -> None:
    browser = Browser(make(users=USERS))
    for name, password in (("ada", "vera's word"), ("nobody", "ada's word"), ("ada", ""), ("", "")):
        assert browser.sign_in(name, password).status_code == 401
        assert browser.get("/work").status_code == 401
    forged = {"name": "ada", "password": "ada's word", "token": "forged"}
    assert browser.ask("POST", "/sign-in", data=forged).status_code == 401


def test_signing_in_leads_to_the_page_that_was_asked_for_and_nowhere_else(make: Make) -> None:
    web = make(users=USERS)
    for where, goes_to in (
        ("waiting?task=a%26b", "/waiting?task=a%26b"),
        ("//evil.example/x", "/evil.example/x"),
        ("/\\/evil.example", "/evil.example"),
        ("https://evil.example", "/https://evil.example"),
        ("x\r\nSet-Cookie: a=b", "/x%0D%0ASet-Cookie:%20a=b"),
    ):
        answer = Browser(web).sign_in("ada", "ada's word", next=where)
        assert answer.headers["Location"] == goes_to
        assert "a=b" not in answer.headers.get("Set-Cookie", "")
    browser = Browser(web)
    form = Form.of(browser.get("/waiting?task=a%26b").text, "/sign-in")
    assert form["next"] == "waiting?task=a%26b"
    acted = browser.ask("POST", "/waiting/cancel", data={"id": "x"})
    assert (acted.status_code, Form.of(acted.text, "/sign-in")["next"]) == (401, "now")


def test_an_action_takes_the_token_of_its_own_session(make: Make) -> None:
    web = make(users={**USERS, "vera": {**USERS["vera"], "role": "operator"}})
    ada, other, vera = (Browser(web) for _ in range(3))
    for browser, name in ((ada, "ada"), (other, "ada"), (vera, "vera")):
        browser.sign_in(name, f"{name}'s word")
    for token in ("", "forged", "0" * 64, "\u00e9", other.token, vera.token):
        assert stop(ada, token=token) == 403
    # In the header, as programs send it.
    assert stop(ada, token="", headers={"X-Rabbitdelay-Token": ada.token}) == LET_THROUGH


def test_a_form_of_another_page_is_refused_in_spite_of_its_token(make: Make) -> None:
    browser = Browser(make(loopback_role="operator"))
    for headers, status in (
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Sec-Fetch-Site": "same-site", "Origin": "http://localhost"}, 403),
        ({"Sec-Fetch-Site": "none"}, 403),
        ({"Origin": "http://localhost"}, LET_THROUGH),
        ({"Origin": "null"}, LET_THROUGH),
        ({"Origin": "https://behind.example", "Sec-Fetch-Site": "same-origin"}, LET_THROUGH),
    ):
        assert stop(browser, headers=headers) == status, headers


def test_an_action_takes_a_form_and_nothing_else(make: Make) -> None:
    browser = Browser(make(loopback_role="operator"))
    for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS"):
        answer = browser.ask(method, f"/work/stop?key=x&token={browser.token}")
        assert answer.status_code == 405
    form = "application/x-www-form-urlencoded"
    for kind, body, status in (
        ("application/json", b'{"key": "x"}', 415),
        (form, b"a=" + b"b" * 2**20, 413),
        (form, b"a=b&" * 3000, 400),
        (form, b"a=%FF", 400),
    ):
        headers = {"Content-Type": kind, "X-Rabbitdelay-Token": browser.token}
        answer = browser.ask("POST", "/work/stop", content=body, headers=headers)
        assert answer.status_code == status, (kind, body[:10])


def test_a_changed_or_foreign_cookie_is_worth_nothing(make: Make) -> None:
    browser = Browser(make(users=USERS, secret=SECRET))
    browser.sign_in("vera", "vera's word")
    cookie = browser.cookies[COOKIE]
    sessions, foreign = Sessions(SECRET), Sessions("t" * 32)
    session = Session.new("ada", sessions.proof(HASHES["ada"]))
    for each in (
        # Not the last character: two of its bits mean nothing.
        f"{cookie[:-9]}{'A' if cookie[-9] != 'A' else 'B'}{cookie[-8:]}",
        foreign.written(Session.new("ada", foreign.proof(HASHES["ada"]))),
        # After a change of the password, or of a user who is gone.
        sessions.written(Session.new("ada", "another password's")),
        sessions.written(Session.new("nobody", session.proof)),
        sessions.written(session, KNOWN_COOKIE),
        "." * 5000,
    ):
        browser.cookies.clear()
        browser.cookies.set(COOKIE, each)
        assert browser.get("/work").status_code == 401, each
    # A role counts at once.
    for role in ("operator", "viewer"):
        other = Browser(make(users={"ada": {**USERS["ada"], "role": role}}, secret=SECRET))
        other.cookies.set(COOKIE, sessions.written(session))
        assert other.json("/session")["role"] == role


def test_wrong_passwords_at_the_same_time_are_bounded_and_lock_out_nobody(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, compared, may_end = Clock(1000), list[str](), Event()

    def is_password(password: str, hashed: str) -> bool:
        compared.append(password)
        assert may_end.wait(60)
        return password == "right"

    monkeypatch.setattr("celery_rabbitdelay.web.access.time", clock)
    monkeypatch.setattr("celery_rabbitdelay.web.access.is_password", is_password)
    web = make(users=USERS)

    async def sign_in() -> None:
        stranger = httpx.AsyncClient(
            transport=httpx.ASGITransport(web), base_url="http://localhost"
        )
        async with stranger:
            form = Form.of((await stranger.get("/now")).text, "/sign-in")
            data = {**form, "name": "ada", "password": "wrong"}
            answers.append((await stranger.post("/sign-in", data=data)).status_code)

    async def attack() -> None:
        strangers = [asyncio.create_task(sign_in()) for _ in range(5)]
        deadline = time.monotonic() + 30
        while len(answers) < 4 and time.monotonic() < deadline:
            await asyncio.sleep(0)
        may_end.set()
        await asyncio.gather(*strangers)

    answers: list[int] = []
    may_end.set()
    known = Browser(web)
    assert known.sign_in("ada", "right").status_code == 303
    for _ in range(MOST_WRONG - 1):
        assert Browser(web).sign_in("ada", "wrong").status_code == 401
    may_end.clear()
    asyncio.run(attack())
    assert sorted(answers) == [401, 429, 429, 429, 429]
    assert compared.count("wrong") == MOST_WRONG
    known.post("/sign-out")
    assert known.sign_in("ada", "right").status_code == 303, "where one has signed in before"
    other = Browser(web)
    assert other.sign_in("ada", "right").status_code == 429
    clock.now += PAUSE
    assert other.sign_in("ada", "right").status_code == 303


def test_the_cookie_is_for_this_page_alone(make: Make) -> None:
    browser = Browser(make(), "https://localhost")
    cookie = browser.get("/work").headers["Set-Cookie"]
    parts = {each.strip().lower() for each in cookie.split(";")[1:]}
    assert {"httponly", "samesite=strict", "secure", "path=/"} <= parts
    assert "Secure" not in Browser(make()).get("/work").headers["Set-Cookie"]
    assert "Secure" in Browser(make(https=True)).get("/work").headers["Set-Cookie"]
    # A link from elsewhere, with which a browser sends no cookie, takes no session away.
    linked = Browser(make()).get("/work", headers={"Sec-Fetch-Site": "cross-site"})
    assert "Set-Cookie" not in linked.headers


def test_a_trusted_proxy_names_the_user_and_nobody_else(make: Make) -> None:
    networks = ["10.0.0.5", "10.1.0.0/16", "fd00::/8"]
    web = make(proxy_header="X-Remote-User", proxies=networks, operators=["ada"])
    for address in ("10.0.0.5", "10.1.2.3", "::ffff:10.0.0.5", "fd00::1"):
        for name, status in (("ada", LET_THROUGH), ("vera", 403)):
            browser = Browser(web, "http://tasks.example", address, {"X-Remote-User": name})
            assert browser.json("/session")["user"] == name
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
    for path in ("/", "/now", "/work", "/nope", "/static/style.css", "/api/session", "/api/x"):
        answer = browser.get(path)
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in answer.headers
        if answer.headers.get("Content-Type", "").startswith("text/html"):
            assert_harmless(answer.text)


def test_who_signs_in_and_who_fails_stands_in_the_log(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    web = make(users=USERS)
    with caplog.at_level(logging.INFO, "celery_rabbitdelay.web"):
        Browser(web).sign_in("ada", "ada's word")
        Browser(web).sign_in("eve\nada has signed in", "guess of a word")
    assert [each.getMessage() for each in caplog.records] == [
        "rabbitdelay web: 'ada' has signed in from 127.0.0.1",
        "rabbitdelay web: wrong password for 'eve\\nada has signed in' from 127.0.0.1",
    ]


def test_a_wrong_option_says_what_it_takes_and_not_its_value(make: Make) -> None:
    costly = f"scrypt:9999999:8:1:{'A' * 22}==:{'A' * 43}="
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"user": {}}, "the options are users, proxy_header"),
        ({"users": {}}, "at least one user"),
        ({"users": {"ada": {"password": "secret word"}}}, "is not hashed"),
        ({"users": {"ada": {"password": costly}}}, "is not hashed"),
        ({"users": {"ada": {**USERS["ada"], "role": "admin"}}}, "takes one of viewer, operator"),
        ({"users": USERS, "identify": print}, "only one of users, proxy_header and identify"),
        ({"proxies": ["10.0.0.1"]}, "set both of proxy_header and proxies"),
        ({"proxy_header": "X-User", "proxies": ["here"]}, "takes addresses and networks"),
        ({"secret": "secret word"}, "at least 32 bytes"),
    ]
    for options, says in wrong:
        with pytest.raises(InvalidSetting) as raised:
            make(**options)
        assert says in str(raised.value)
        assert "secret word" not in str(raised.value)
