"""The page mounted in FastAPI, beside Django and beside Flask, each as its documentation says."""

import sys
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urljoin, urlsplit
from uuid import uuid4

import httpx
import pytest
from kombu import Connection

from celery_rabbitdelay.web.pages import PAGES
from tests.browser import ADDRESSES, Form, read
from tests.celery_process import REPOSITORY
from tests.documentation.page import blocks
from tests.kernel.integration.shop import PATIENCE
from tests.kernel.integration.worker import ShopProcess, answers
from tests.operations.integration.undeliverable_messages import message, put, straight
from tests.web.integration.page import HOUR, OPERATOR, PASSWORD, standing_shop, with_users

#: The programs of the documentation, by the names of their files.
PROGRAMS: Final = {
    each.argument: each.code
    for each in blocks(REPOSITORY / "docs" / "how-to" / "page.md")
    if each.action == "file"
}

#: How each is served, and how the application around the page says that it has no such page.
SERVERS: Final = {
    "fastapi_page": ("uvicorn fastapi_page:web", '{"detail":"Not Found"}'),
    "django_page": ("uvicorn django_page:application", "<h1>Not Found</h1>"),
    "flask_page": ("uvicorn flask_page:web", "<h1>Not Found</h1>\n<p>"),
    "flask_wsgi_page": ("flask --app flask_wsgi_page:web run", "<h1>Not Found</h1>\n<p>"),
}

#: How many addresses of one page are opened.
MOST_OF_A_PAGE: Final = 12

#: The other files of the project: the shop of these tests, and what Django needs.
PROJECT: Final = {
    "shop/__init__.py": "from shop.celery import app",
    "shop/celery.py": "from tests.kernel.integration.shop import app",
    "shop/settings.py": "SECRET_KEY = 'tests'; ROOT_URLCONF = 'shop.urls'; ALLOWED_HOSTS = ['*']",
    "shop/urls.py": "urlpatterns = []",
}


class Mounted(ShopProcess):
    """A server of one of :data:`PROGRAMS`.

    Args:
        settings: What :func:`tests.kernel.integration.shop.make_app` takes.
        program: Which.
    """

    package = "uvicorn"

    def __init__(self, settings: dict[str, Any], program: str) -> None:
        super().__init__(settings)
        self._serve, self.not_found = SERVERS[program]
        for name, code in {**PROJECT, f"{program}.py": PROGRAMS[f"{program}.py"]}.items():
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(code)

    @property
    def address(self) -> str:
        return f"http://localhost:{self.port}"

    def _command(self) -> list[str]:
        return [sys.executable, "-m", *self._serve.split(), f"--port={self.port}"]

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), "PYTHONPATH": f"{self.folder}:{REPOSITORY}"}

    def _ready(self) -> bool:
        return answers(f"{self.address}/tasks/static/icon.svg")


@pytest.fixture(scope="module")
def shop(module_broker_url: str, redis_url: str) -> Iterator[Any]:
    """An application with something on each page; no worker serves it."""
    settings = with_users(redis_url, shows_arguments=True)
    with standing_shop(module_broker_url, redis_url, **settings) as app:
        app.tasks["look"].apply_async(delay=HOUR, key="order:7")
        app.rabbitdelay.schedules.put("each hour", "look", timedelta(hours=1))
        app.rabbitdelay.open_job(job := uuid4().hex, expires=HOUR)
        with Connection(app.conf.broker_url) as connection:
            lost = message("[]", straight("gone", id="lost", task="look"))
            put(connection, app.rabbitdelay.topology, lost)
        yield app
        app.rabbitdelay.schedules.delete("each hour")
        app.rabbitdelay.abort_job(job)


@pytest.mark.parametrize("program", SERVERS)
def test_below_its_path_the_page_is_whole_and_all_other_paths_are_the_application_s(
    shop: Any, program: str
) -> None:
    with (
        Mounted(shop.configuration, program) as server,
        httpx.Client(base_url=server.address, follow_redirects=True, timeout=PATIENCE) as client,
    ):
        assert client.get("/tasks/now").status_code == 401
        client.auth = OPERATOR, PASSWORD
        assert "Not found" in client.get("/tasks/nowhere").text
        assert server.not_found in client.get("/nowhere").text
        all_that_its_pages_link_is_below_its_path(server, client)
        a_task_is_cancelled_with_the_form_of_its_page(shop, client)


def all_that_its_pages_link_is_below_its_path(server: Mounted, client: httpx.Client) -> None:
    linked, seen = {str(client.get("/tasks").url)}, set[str]()
    opened = Counter[str]()
    while new := linked - seen:
        seen.add(each := new.pop())
        assert each.startswith(f"{server.address}/tasks/"), each
        opened[urlsplit(each).path] += 1
        if opened[urlsplit(each).path] > MOST_OF_A_PAGE:
            continue  # facets and switches lead on to any number of searches
        answer = client.get(each)
        # 405: a form is sent there; 503: there is no management API.
        assert answer.status_code in (200, 405, 503), each
        if answer.headers["Content-Type"].startswith("text/html"):
            linked |= {
                urljoin(str(answer.url), value or "")
                for _, values in read(answer.text).tags
                for name, value in values.items()
                if name in ADDRESSES
            }
    paths = {urlsplit(each).path.removeprefix("/tasks/") for each in seen}
    assert {each.path for each in PAGES if not each.is_action} <= paths


def a_task_is_cancelled_with_the_form_of_its_page(shop: Any, client: httpx.Client) -> None:
    task_id = shop.tasks["look"].apply_async(("Köln",), delay=HOUR, task_id=f"é {uuid4()}").id
    page = client.get("/tasks/waiting/task", params={"id": task_id})
    asked = {**Form.of(page.text, "/tasks/waiting/confirm"), "action": "cancel"}
    confirmation = client.post("/tasks/waiting/confirm", data=asked).text
    target = "/tasks/waiting/decide?q=&action=cancel"
    form = Form.of(confirmation, target)
    evil = {"Origin": "https://evil.example"}
    forged = client.post(target, data=form, headers=evil)
    assert forged.status_code == 403
    assert shop.rabbitdelay.show(task_id).state == "waiting"
    assert client.post(target, data=form).status_code == 200
    assert shop.rabbitdelay.show(task_id).state == "cancelled"
