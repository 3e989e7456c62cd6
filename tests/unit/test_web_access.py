"""Who may see the page and act on it, and what else is refused."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import celery
import httpx
import pytest
from fastapi import FastAPI

from celery_rabbitdelay import Celery
from celery_rabbitdelay.exceptions import InvalidSetting
from celery_rabbitdelay.testing import wait_for
from celery_rabbitdelay.web import User, application
from celery_rabbitdelay.web.sessions import COOKIE, KNOWN_COOKIE, Session, Sessions
from celery_rabbitdelay.web.work import Works
from tests.browser import Browser, Form, assert_harmless, quick_hash

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


def stop(browser: Browser, **options: Any) -> httpx.Response:
    """Try an action."""
    token = options.pop("token", None)
    data = {"key": "none", "token": browser.token if token is None else token}
    return browser.ask("POST", "/work/stop", data=data, **options)


@pytest.mark.parametrize(
    "client", ["10.0.0.5", "192.168.1.1", "::ffff:10.0.0.5", "2001:db8::1", None]
)
def test_without_users_only_this_machine_is_answered(make: Make, client: str | None) -> None:
    answer = Browser(make(), client=client).get("/work")
    assert answer.status_code == 403
    assert "rabbitdelay_web" in answer.text
    assert Browser(make()).get("/work").status_code == 200
    assert Browser(make(), client="::1").get("/work").status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        *("Forwarded", "X-Forwarded-For", "X-Forwarded-Proto", "X-Forwarded-Port"),
        *("X-Forwarded-Prefix", "X-Forwarded-Client-Cert", "Via", "X-Real-IP"),
    ],
)
def test_without_users_nobody_is_answered_through_a_proxy(make: Make, header: str) -> None:
    browser = Browser(make(), headers={header: "127.0.0.1"})
    assert browser.get("/work").status_code == 403


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:5556", "localhost.evil.example", "10.0.0.1", "", "[", "[::2]"],
)
def test_a_foreign_name_that_points_to_this_machine_is_refused(make: Make, host: str) -> None:
    answer = Browser(make()).get("/work", headers={"Host": host})
    assert answer.status_code == 421
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:5556", "127.0.0.1:5556", "[::1]:5556"])
def test_the_names_of_this_machine_are_known(make: Make, host: str) -> None:
    assert Browser(make()).get("/work", headers={"Host": host}).status_code == 200


def test_with_hosts_only_these_names_are_known(make: Make) -> None:
    browser = Browser(make(hosts=["tasks.example"]))
    assert browser.get("/work", headers={"Host": "Tasks.Example:443"}).status_code == 200
    assert browser.get("/work", headers={"Host": "localhost"}).status_code == 421


def test_without_users_nobody_acts_unless_it_is_configured(make: Make) -> None:
    assert stop(Browser(make())).status_code == 403
    assert stop(Browser(make(loopback_role="operator"))).status_code == LET_THROUGH


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
        assert stop(browser).status_code == status


def test_after_signing_out_nothing_is_shown(make: Make) -> None:
    """Neither to a copy of the cookie, nor by a process that has not been told of it."""
    browser = Browser(make(users=USERS, secret=SECRET))
    browser.sign_in("ada", "ada's word")
    assert browser.ask("POST", "/sign-out", data={"token": "none"}).status_code == 403
    copy = browser.cookies[COOKIE]
    assert browser.post("/sign-out").status_code == 303
    assert browser.get("/work").status_code == 401
    signed_out = int(time.time())
    wait_for(lambda: int(time.time()) > signed_out, "the next second: cookies count in seconds")
    for each in (browser, Browser(make(users=USERS, secret=SECRET))):
        each.cookies.set(COOKIE, copy)
        assert each.get("/work").status_code == 401


@pytest.mark.parametrize(
    ("name", "password"), [("ada", "vera's word"), ("nobody", "ada's word"), ("ada", ""), ("", "")]
)
def test_a_wrong_name_or_password_is_refused(make: Make, name: str, password: str) -> None:
    browser = Browser(make(users=USERS))
    answer = browser.sign_in(name, password)
    assert answer.status_code == 401
    assert "Name or password is wrong." in answer.text
    assert browser.get("/work").status_code == 401


@pytest.mark.parametrize(
    ("where", "goes_to"),
    [
        ("waiting?task=a%26b", "/waiting?task=a%26b"),
        ("//evil.example/x", "/evil.example/x"),
        ("\\\\evil.example", "/evil.example"),
        ("/\\/evil.example", "/evil.example"),
        ("https://evil.example", "/https://evil.example"),
        ("x\r\nSet-Cookie: a=b", "/x%0D%0ASet-Cookie:%20a=b"),
        ("", "/now"),
    ],
)
def test_signing_in_leads_nowhere_else(make: Make, where: str, goes_to: str) -> None:
    answer = Browser(make(users=USERS)).sign_in("ada", "ada's word", next=where)
    assert answer.headers["Location"] == goes_to
    assert "a=b" not in answer.headers.get("Set-Cookie", "")


def test_signing_in_leads_to_the_page_that_was_asked_for(make: Make) -> None:
    browser = Browser(make(users=USERS))
    form = Form.of(browser.get("/waiting?task=a%26b").text, "/sign-in")
    assert form["next"] == "waiting?task=a%26b"


def test_signing_in_needs_its_own_form(make: Make) -> None:
    browser = Browser(make(users=USERS))
    browser.get("/now")
    data = {"name": "ada", "password": "ada's word", "token": "forged"}
    assert browser.ask("POST", "/sign-in", data=data).status_code == 401
    assert browser.get("/work").status_code == 401


@pytest.mark.parametrize("token", ["", "forged", "0" * 64, "\ud800"])
def test_a_missing_or_forged_token_is_refused(make: Make, token: str) -> None:
    web = make(loopback_role="operator")
    browser = Browser(web)
    browser.json("/session")
    data = f"key=none&token={'%ED%A0%80' if token > '~' else token}"
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = browser.ask("POST", "/work/stop", content=data, headers=headers)
    assert answer.status_code == 403
    assert stop(browser).status_code == LET_THROUGH


def test_the_token_of_another_browser_or_user_is_refused(make: Make) -> None:
    web = make(users={**USERS, "vera": {**USERS["vera"], "role": "operator"}})
    ada, other, vera = (Browser(web) for _ in range(3))
    ada.sign_in("ada", "ada's word")
    other.sign_in("ada", "ada's word")
    vera.sign_in("vera", "vera's word")
    assert stop(ada, token=other.token).status_code == 403
    assert stop(ada, token=vera.token).status_code == 403
    assert stop(ada, token=ada.token).status_code == LET_THROUGH


def test_the_token_may_stand_in_a_header_for_programs(make: Make) -> None:
    browser = Browser(make(loopback_role="operator"))
    headers = {"X-Rabbitdelay-Token": browser.token}
    answer = browser.ask("POST", "/api/work/stop", data={"key": "none"}, headers=headers)
    assert (answer.status_code, list(answer.json())) == (LET_THROUGH, ["error"])


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "http://localhost:8000"},
        {"Origin": "https://localhost]"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost"},
    ],
)
def test_a_form_of_another_page_is_refused_in_spite_of_its_token(
    make: Make, headers: dict[str, str]
) -> None:
    browser = Browser(make(loopback_role="operator"))
    assert stop(browser, headers=headers).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://localhost"},
        {"Origin": "null", "Sec-Fetch-Site": "same-origin"},
        {"Origin": "null"},
        {"Origin": "https://behind.example", "Sec-Fetch-Site": "same-origin"},
    ],
)
def test_our_own_forms_are_accepted(make: Make, headers: dict[str, str]) -> None:
    browser = Browser(make(loopback_role="operator"))
    assert stop(browser, headers=headers).status_code == LET_THROUGH


def test_an_action_takes_a_form_and_not_another_body(make: Make) -> None:
    browser = Browser(make(loopback_role="operator"))
    for kind, body, status in (
        ("application/json", b'{"key": "x"}', 415),
        ("multipart/form-data; boundary=x", b"--x--", 415),
        ("text/plain", b"token=x", 415),
        ("application/x-www-form-urlencoded", b"a=" + b"b" * 2**20, 413),
        ("application/x-www-form-urlencoded", b"a=b&" * 3000, 400),
        ("application/x-www-form-urlencoded", b"a=%FF", 400),
    ):
        headers = {"Content-Type": kind, "X-Rabbitdelay-Token": browser.token}
        answer = browser.ask("POST", "/work/stop", content=body, headers=headers)
        assert answer.status_code == status, (kind, body[:10])


def test_nothing_changes_by_opening_a_page(make: Make) -> None:
    browser = Browser(make(loopback_role="operator"))
    for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS"):
        answer = browser.ask(method, f"/work/stop?key=x&token={browser.token}")
        assert answer.status_code == 405


def test_a_changed_or_foreign_cookie_is_worth_nothing(make: Make) -> None:
    web = make(users=USERS, secret=SECRET)
    browser = Browser(web)
    browser.sign_in("vera", "vera's word")
    cookie = browser.cookies[COOKIE]
    sessions, foreign = Sessions(SECRET), Sessions("t" * 32)
    proof = sessions.proof(HASHES["ada"])
    wrong = [
        # Not the last character: two of its bits mean nothing.
        f"{cookie[:-9]}{'A' if cookie[-9] != 'A' else 'B'}{cookie[-8:]}",
        cookie.swapcase(),
        foreign.written(Session.new("ada", foreign.proof(HASHES["ada"]))),
        sessions.written(Session.new("ada", "another password's")),
        sessions.written(Session.new("ada")),
        sessions.written(Session.new("nobody", proof)),
        sessions.written(Session.new("ada", proof), KNOWN_COOKIE),
        "",
        "a.b.c",
        "." * 5000,
    ]
    for each in wrong:
        browser.cookies.clear()
        browser.cookies.set(COOKIE, each)
        assert browser.get("/work").status_code == 401, each
    browser.cookies.clear()
    browser.cookies.set(COOKIE, sessions.written(Session.new("ada", proof)))
    assert browser.json("/session")["role"] == "operator"


def test_another_password_ends_the_sessions_and_a_role_counts_at_once(make: Make) -> None:
    changed = (
        ({"ada": {**USERS["ada"], "role": "viewer"}}, 403),
        ({"ada": {"password": quick_hash("new"), "role": "operator"}}, 401),
        ({"vera": USERS["vera"]}, 401),
    )
    others = [(Browser(make(users=users, secret=SECRET)), status) for users, status in changed]
    browser = Browser(make(users=USERS, secret=SECRET))
    browser.sign_in("ada", "ada's word")
    for other, status in others:
        other.cookies = browser.cookies
        token = browser.token
        assert stop(other, token=token).status_code == status


def test_the_cookie_is_for_this_page_alone(make: Make) -> None:
    browser = Browser(make(), "https://localhost")
    cookie = browser.get("/work").headers["Set-Cookie"]
    parts = {each.strip().lower() for each in cookie.split(";")[1:]}
    assert {"httponly", "samesite=strict", "secure", "path=/"} <= parts
    plain = Browser(make()).get("/work").headers["Set-Cookie"]
    assert "Secure" not in plain
    assert "Secure" in Browser(make(https=True)).get("/work").headers["Set-Cookie"]


def test_a_link_from_elsewhere_takes_no_session_away(make: Make) -> None:
    web = make(users=USERS)
    browser = Browser(web)
    browser.sign_in("ada", "ada's word")
    from_elsewhere = Browser(web).get("/work", headers={"Sec-Fetch-Site": "cross-site"})
    assert from_elsewhere.status_code == 401
    assert f"{COOKIE}=" not in from_elsewhere.headers["Set-Cookie"]
    open_page = Browser(make()).get("/work", headers={"Sec-Fetch-Site": "cross-site"})
    assert "Set-Cookie" not in open_page.headers


PROXY: dict[str, Any] = {
    "proxy_header": "X-Remote-User",
    "proxies": ["10.0.0.5", "10.1.0.0/16", "fd00::/8"],
    "operators": ["ada"],
}


@pytest.mark.parametrize("address", ["10.0.0.5", "10.1.2.3", "::ffff:10.0.0.5", "fd00::1"])
def test_a_trusted_proxy_names_the_user(make: Make, address: str) -> None:
    web = make(**PROXY)
    for name, status in (("ada", LET_THROUGH), ("vera", 403)):
        browser = Browser(web, "http://tasks.example", address, {"X-Remote-User": name})
        assert browser.json("/session")["user"] == name
        assert stop(browser).status_code == status
    assert Browser(web, client=address).get("/work").status_code == 403


@pytest.mark.parametrize("address", ["10.0.0.6", "127.0.0.1", "::1", "not an address", None])
def test_nobody_else_names_a_user(make: Make, address: str | None) -> None:
    browser = Browser(make(**PROXY), client=address, headers={"X-Remote-User": "ada"})
    assert browser.get("/work").status_code == 403


def test_two_headers_of_a_proxy_name_nobody(make: Make) -> None:
    browser = Browser(make(**PROXY), client="10.0.0.5")
    headers: Any = [("X-Remote-User", "ada"), ("x-remote-user", "vera")]

    async def ask() -> int:
        transport = httpx.ASGITransport(browser._web, client=("10.0.0.5", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get("/work", headers=headers)).status_code

    assert asyncio.run(ask()) == 403
    assert browser.get("/work", headers={"X-Remote-User": "  "}).status_code == 403


def test_a_function_of_the_application_s_names_the_user(make: Make) -> None:
    def identify(scope: Any) -> Any:
        name = dict(scope["headers"]).get(b"x-name", b"").decode()
        if name == "broken":
            raise LookupError("the database of users is away")
        return {"ada": User("ada", "operator"), "vera": User("vera"), "odd": "ada"}.get(name)

    web = make(identify=identify)
    for name, status in (("ada", LET_THROUGH), ("vera", 403)):
        assert stop(Browser(web, client="10.0.0.5", headers={"X-Name": name})).status_code == status
    for name in ("nobody", "odd", "broken"):
        assert Browser(web, headers={"X-Name": name}).get("/work").status_code == 403


PATHS = [
    *("/static/../options.py", "/static/%2e%2e/options.py", "/static/..%2foptions.py"),
    *("/static//etc/passwd", "/static/%2fetc%2fpasswd", "/static/style.css/../../asgi.py"),
    *("/../../etc/passwd", "/waiting/../../x", "/api/../api/x", "/static/%00", "/%ff", "//evil/x"),
    *("/now/", "/NOW", "/api", "/api/", "/api/now/x", "/now;x", "/now%3Fx"),
]


@pytest.mark.parametrize(
    ("path", "goes_to"),
    [("/now/?x=1", "/now?x=1"), ("//evil.example/x/", "/%2Fevil.example/x")],
)
def test_a_slash_too_many_leads_to_a_path_and_to_no_name(
    make: Make, path: str, goes_to: str
) -> None:
    web, outer = make(users=USERS), FastAPI()
    outer.mount("/ops", web)
    for base, served in (("", web), ("/ops", outer)):
        browser = Browser(served, headers={"Host": "evil.example"})
        answer = browser.get(f"http://localhost{base}{path}")
        assert (answer.status_code, answer.headers["Location"]) == (307, f"{base}{goes_to}")


@pytest.mark.parametrize("path", PATHS)
def test_tricks_with_paths_lead_nowhere(make: Make, path: str) -> None:
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "raw_path": path.encode(),
        "path": httpx.URL("http://localhost").copy_with(raw_path=path.encode()).path,
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 80),
    }
    status, body, headers = run(make(), scope)
    assert status in (303, 307, 404, 405), status
    assert b"def " not in body
    assert b"root:" not in body
    assert not dict(headers).get(b"location", b"/").startswith((b"//", b"http://evil"))


def run(web: Any, scope: dict[str, Any]) -> tuple[int, bytes, Any]:
    """Send one request with exactly this scope."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(web(scope, receive, send))
    body = b"".join(each.get("body", b"") for each in sent)
    return sent[0]["status"], body, sent[0]["headers"]


def test_every_answer_forbids_foreign_scripts_frames_and_copies(make: Make) -> None:
    browser = Browser(make())
    for path in ("/", "/work", "/waiting", "/nope", "/static/style.css", "/api/session", "/api/x"):
        headers = browser.get(path).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    ("base", "options", "is_sent"),
    [
        ("https://tasks.example", {}, True),
        ("http://tasks.example", {"https": True}, True),
        ("http://localhost:5556", {}, True),
        ("http://ada.localhost", {}, True),
        ("http://127.0.0.2:5556", {}, True),
        ("http://[::1]:5556", {}, True),
        ("http://tasks.example", {}, False),
        ("http://localhost.example", {}, False),
        ("http://10.0.0.1", {}, False),
    ],
)
def test_a_header_that_browsers_ignore_over_plain_http_is_not_sent_there(
    make: Make, base: str, options: dict[str, Any], is_sent: bool
) -> None:
    headers = Browser(make(users=USERS, **options), base).get("/now").headers
    assert (headers.get("Cross-Origin-Opener-Policy") == "same-origin") is is_sent


def test_the_pages_have_nothing_that_their_policy_forbids(make: Make) -> None:
    browser = Browser(make(loopback_role="operator"))
    for path in ("/now", "/waiting", "/health", "/work", "/nope", "/waiting/all"):
        assert_harmless(browser.get(path).text)
    assert_harmless(Browser(make(users=USERS)).get("/now").text)


def test_a_mistake_of_ours_is_an_answer_with_the_same_headers(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = make()
    monkeypatch.setattr(Works, "all", lambda self: 1 / 0)
    answer = Browser(web).get("/api/work")
    assert (answer.status_code, list(answer.json())) == (500, ["error"])
    assert "ZeroDivisionError" not in answer.text
    assert "Content-Security-Policy" in answer.headers


def test_it_works_below_any_path(make: Make) -> None:
    outer = FastAPI()
    outer.mount("/ops/tasks", make(users=USERS))
    browser = Browser(outer, "http://tasks.example")
    page = browser.get("/ops/tasks/waiting?task=x")
    form = Form.of(page.text, "/sign-in")
    assert_harmless(page.text)
    data = {**form, "name": "ada", "password": "ada's word"}
    answer = browser.ask("POST", "/ops/tasks/sign-in", data=data)
    assert answer.headers["Location"] == "/ops/tasks/waiting?task=x"
    assert "path=/ops/tasks" in answer.headers.get_list("Set-Cookie")[-1].lower()
    work = browser.get("/ops/tasks/work")
    assert work.status_code == 200
    assert 'href="/ops/tasks/static/style.css"' in work.text
    assert browser.get("/ops/tasks/static/style.css").status_code == 200
    token = browser.get("/ops/tasks/api/session").json()["token"]
    stopped = browser.ask("POST", "/ops/tasks/work/stop", data={"key": "x", "token": token})
    assert stopped.status_code == LET_THROUGH
    assert browser.get("/ops/tasks/api/openapi.json").json()["servers"] == [
        {"url": "/ops/tasks/api"}
    ]


def test_who_signs_in_and_who_fails_stands_in_the_log(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    browser = Browser(make(users=USERS))
    with caplog.at_level(logging.INFO, "celery_rabbitdelay.web"):
        browser.sign_in("ada", "ada's word")
        Browser(browser._web).sign_in("eve\nada has signed in", "guess of a word")
    lines = [each.getMessage() for each in caplog.records]
    assert lines == [
        "'ada' has signed in from 127.0.0.1",
        "A wrong password for 'eve\\nada has signed in' from 127.0.0.1",
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"user": {}}, "did you mean users?"),
        ({"users": {}}, "at least one user"),
        ({"users": {"ada": "word"}}, "takes a password and a role"),
        ({"users": {"ada": {"password": "secret word"}}}, "is not hashed"),
        (
            {
                "users": {
                    "ada": {"password": "scrypt:9999999:8:1:" + "A" * 22 + "==:" + "A" * 43 + "="}
                }
            },
            "is not hashed",
        ),
        ({"users": {"ada": {**USERS["ada"], "role": "admin"}}}, "takes one of viewer, operator"),
        ({"users": USERS, "identify": print}, "takes one of users, proxy_header and identify"),
        ({"proxy_header": "X-Remote-User"}, "need each other"),
        ({"proxies": ["10.0.0.1"]}, "need each other"),
        ({"proxy_header": "X-User", "proxies": ["here"]}, "takes addresses and networks"),
        ({"proxy_header": "X-User", "proxies": "10.0.0.1"}, "takes a list of texts"),
        ({"identify": "ada"}, "takes a function"),
        ({"mask": "***"}, "takes a function"),
        ({"loopback_role": "admin"}, "takes one of viewer, operator"),
        ({"secret": "secret word"}, "at least 32 bytes"),
        ({"hosts": "tasks.example"}, "takes a list of texts"),
    ],
)
def test_a_wrong_option_says_what_it_takes_and_not_its_value(
    make: Make, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidSetting) as raised:
        make(**options)
    assert says in str(raised.value)
    assert "secret word" not in str(raised.value)


def test_the_setting_has_the_options_and_arguments_override_them() -> None:
    app = Celery("shop", broker="amqp://127.0.0.1:1", set_as_current=False)
    app.conf.rabbitdelay_web = {"loopback_role": "operator", "hosts": ["one"]}
    browser = Browser(application(app, hosts=["two"]))
    answer = browser.get("/api/session", headers={"Host": "two"})
    assert answer.json()["role"] == "operator"


def test_an_application_without_delays_is_refused() -> None:
    with pytest.raises(TypeError, match=r"install\(app\)"):
        application(celery.Celery("plain", set_as_current=False))
