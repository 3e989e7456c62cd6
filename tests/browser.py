"""A browser without a window: asks the page, and reads its HTML."""

import asyncio
import re
from html.parser import HTMLParser
from typing import Any

import httpx


class Browser:
    """Asks an ASGI application in this process, or what is served over HTTP.

    Args:
        web: The application; None for what is served at the base.
        base: Where it is reached.
        client: The address that the requests come from; None: through a Unix socket.
        headers: Headers of every request.
        auth: The name and the password of every request; None for none.
    """

    def __init__(
        self,
        web: Any,
        base: str = "http://localhost",
        client: str | None = "127.0.0.1",
        headers: dict[str, str] | None = None,
        auth: tuple[str, str] | None = None,
    ) -> None:
        self.base = base
        self._web = web
        self._client = None if client is None else (client, 4711)
        self._headers = headers or {}
        self._auth = auth

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request; a redirection is not followed."""

        async def ask() -> httpx.Response:
            transport = self._web and httpx.ASGITransport(
                self._web,
                raise_app_exceptions=False,
                client=self._client,  # type: ignore[arg-type]
            )
            async with httpx.AsyncClient(
                transport=transport, base_url=self.base, auth=self._auth, timeout=60
            ) as client:
                more = options.pop("headers", {})
                headers = [
                    *self._headers.items(),
                    *(more if isinstance(more, list) else more.items()),
                ]
                return await client.request(method, path, headers=headers, **options)

        return asyncio.run(ask())

    def get(self, path: str, **options: Any) -> httpx.Response:
        """Open a page."""
        return self.ask("GET", path, **options)

    def json(self, path: str, **query: Any) -> dict[str, Any]:
        """Return what ``/api`` says."""
        answer = self.get(f"/api{path}", params=query)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    def post(self, path: str, **fields: Any) -> httpx.Response:
        """Send a form."""
        form = {"Content-Type": "application/x-www-form-urlencoded"}  # also without fields
        return self.ask("POST", path, data=fields, headers=form)


class Form(HTMLParser):
    """Collects the hidden fields of the form with an action, and all tags of a page."""

    def __init__(self, action: str) -> None:
        super().__init__(convert_charrefs=True)
        self.fields: dict[str, str] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._action = action
        self._inside = False

    @classmethod
    def of(cls, page: str, action: str) -> dict[str, str]:
        """Return the hidden fields of a form."""
        parser = cls(action)
        parser.feed(page)
        return parser.fields

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag."""
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag == "form":
            self._inside = str(values.get("action")).endswith(self._action)
        if self._inside and tag == "input" and values.get("type") == "hidden":
            self.fields[str(values["name"])] = values["value"] or ""

    def handle_data(self, data: str) -> None:
        """Note a text."""
        self.text += data


def read(page: str) -> Form:
    """Return the tags and the text of a page."""
    parser = Form("")
    parser.feed(page)
    return parser


def assert_harmless(page: str) -> None:
    """Assert that nothing on a page runs, loads from elsewhere, or hides or turns text."""
    parsed = read(page)
    for tag, values in parsed.tags:
        assert tag in KNOWN_TAGS, tag
        for name, value in values.items():
            assert not name.startswith("on"), (tag, name)
            assert name != "style", tag
            if name in ADDRESSES:
                assert re.match(r"/(?!/)|#", value or ""), (tag, value)
        assert tag != "script" or str(values.get("src", "")).endswith("/static/htmx.min.js")
    shown = parsed.text + "".join(
        str(each) for _, values in parsed.tags for each in values.values()
    )
    unexpected = {each for each in shown if not each.isprintable()} - {"\n"}
    assert not unexpected, unexpected


#: The attributes that are addresses.
ADDRESSES = ("href", "src", "action", "formaction", "hx-get")

#: The tags of our templates.
KNOWN_TAGS = {
    *("html", "head", "meta", "title", "link", "script", "body", "a", "header", "p", "nav", "ul"),
    *("li", "div", "form", "input", "button", "main", "footer", "h1", "h2", "h3", "strong", "span"),
    *("section", "ol", "table", "caption", "thead", "tbody", "tr", "th", "td", "figure", "bdi"),
    *("figcaption", "meter", "progress", "time", "label", "fieldset", "legend", "dl", "dt", "dd"),
    *(
        "article",
        "svg",
        "details",
        "summary",
        "code",
        "symbol",
        "use",
        "path",
        "line",
        "circle",
        "rect",
        "polyline",
        "g",
        "title",
        "textarea",
        "select",
        "option",
        "datalist",
    ),
}
