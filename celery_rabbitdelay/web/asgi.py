"""The ASGI application: serves pages as HTML and as JSON, and renders errors."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from celery_rabbitdelay import __version__
from celery_rabbitdelay.command.shared import local
from celery_rabbitdelay.exceptions import InvalidSearch, RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.metrics.reading import AWAY, why
from celery_rabbitdelay.registry import durations
from celery_rabbitdelay.registry.query import Term
from celery_rabbitdelay.web import charts, shown
from celery_rabbitdelay.web.access import Access, Shield
from celery_rabbitdelay.web.pages import PAGES, Page
from celery_rabbitdelay.web.site import Site
from celery_rabbitdelay.web.view_request import Fields, ViewRequest, fields_of, form_of


class Server:
    """Answers requests.

    Args:
        site: The readings and actions that all requests share.
    """

    def __init__(self, site: Site) -> None:
        zone = site.app.timezone
        self._site = site
        self._access = Access(site.options)
        self._templates = Environment(
            loader=PackageLoader("celery_rabbitdelay.web"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(
            shown=shown.printable,
            quoted=shown.quoted,
            brief=durations.brief,
            left=durations.left,
            soon=lambda instant: durations.left(max(instant, wall_clock.now())),
            fullness=shown.fullness,
            number=lambda value: f"{value:,}",
            local=partial(local, zone=zone),
        )
        self._templates.globals.update(
            package_version=__version__,
            zone=str(zone),
            menu=[each for each in PAGES if each.in_menu],
            most_in_address=shown.MOST_IN_ADDRESS,
            term=lambda name, text: str(Term.of(name, text)),
            virtual_host=site.queues_broker.connection.virtual_host,
            prefix=site.delays.topology.prefix,
            plot=partial(charts.plot, zone=zone),
        )

    def application(self) -> ASGIApp:
        """Return the ASGI application; see :func:`celery_rabbitdelay.web.application`."""
        routes: list[Route | Mount] = [
            Route("/", self._first),
            Mount("/static", StaticFiles(packages=[("celery_rabbitdelay.web", "static")])),
        ]
        for page in PAGES:
            answer, methods = self._endpoint(page), ["POST"] if page.is_action else ["GET"]
            routes += [
                Route(f"{base}/{page.path}", answer, methods=methods) for base in ("", "/api")
            ]
        served = Starlette(
            routes=routes,
            exception_handlers={HTTPException: self._failed, Exception: self._broken},
        )
        served.router.redirect_slashes = False  # a redirect would trust the request's Host
        return Shield(served, self._site.options)

    def _endpoint(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            user = await self._access.user(request)
            fields = fields_of(request.url.query.encode())
            if page.is_action:
                form = await form_of(request)
                if not user.may_act:
                    name = shown.printable(user.name)
                    raise HTTPException(403, f"{name} is a viewer: only operators may act.")
                fields = Fields([*fields.multi_items(), *form.multi_items()])
            view_request = ViewRequest(self._site, user, fields)
            try:
                content = await run_in_threadpool(page.view, view_request)
            except InvalidSearch as wrong:
                raise HTTPException(400, str(wrong)) from wrong
            except AWAY as error:
                server = "Redis" if isinstance(error, RegistryUnavailable) else "The broker"
                raise HTTPException(503, f"{server} cannot be reached: {why(error)}") from error
            if _is_api(request):
                return _json(content)
            if "see" in content:
                return RedirectResponse(f"{_base(request)}/{content['see']}", 303)
            values = {"user": user, "page": page, "request": view_request, **content}
            return HTMLResponse(self._html(request, page.template, values))

        return answer

    async def _first(self, request: Request) -> Response:
        return RedirectResponse(f"{_base(request)}/now", 303)

    async def _failed(self, request: Request, error: Exception) -> Response:
        """Answer a refused request with its error."""
        assert isinstance(error, HTTPException)
        if error.status_code == 404 and _path(request) == "/":  # the mount's path without a slash
            return await self._first(request)
        if _is_api(request):
            return _json({"error": error.detail}, error.status_code, error.headers)
        user = None
        if error.status_code != 401:
            with suppress(HTTPException):
                user = await self._access.user(request)
        q, back = request.query_params.get("q", ""), _came_from(request)
        values = {"page": None, "user": user, "error": error, "q": q, "back": back}
        return HTMLResponse(self._html(request, "error", values), error.status_code, error.headers)

    async def _broken(self, request: Request, error: Exception) -> Response:
        """Answer a request that raised an unexpected exception; Starlette logs the exception."""
        failed = HTTPException(500, "An unexpected error. The server's log has the details.")
        return await self._failed(request, failed)

    def _html(self, request: Request, template: str, values: Mapping[str, object]) -> bytes:
        """Render a page."""
        base, path, query = _base(request), _path(request), request.url.query
        shared = {"base": base, "path": path, "here": f"{base}{path}?{query}".removesuffix("?")}
        text = self._templates.get_template(f"{template}.html").render({**shared, **values})
        return text.encode("utf-8", "backslashreplace")


def _base(request: Request) -> str:
    """Return the URL-quoted path that the application is mounted at; empty for the root."""
    return shown.quoted_path(request.scope.get("root_path", "").rstrip("/"))


def _path(request: Request) -> str:
    """Return the URL-quoted path, relative to the mount point."""
    path: str = request.scope["path"]
    return shown.quoted_path(path.removeprefix(request.scope.get("root_path", "")) or "/")


def _came_from(request: Request) -> str | None:
    """Return the page in the header ``Referer``, relative to the mount point; None if not ours."""
    start = f"//{request.headers['host']}{_base(request)}/"
    page = request.headers.get("referer", "").partition(start)[2]
    is_ours = page.partition("?")[0] in {each.path for each in PAGES if not each.is_action}
    return page if is_ours else None


def _is_api(request: Request) -> bool:
    """Return whether a request asks for JSON."""
    return _path(request).startswith("/api/")


def _json(
    content: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    # ASCII: a string may contain half of a surrogate pair.
    text = json.dumps(shown.plain(content))
    return Response(text, status, headers, media_type="application/json")
