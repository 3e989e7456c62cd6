"""The ASGI application: each page as HTML and as JSON, signing in and out, and errors."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

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
from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.metrics.reading import AWAY, why
from celery_rabbitdelay.web import access, charts, shown
from celery_rabbitdelay.web.access import COOKIE, Session, Visitor
from celery_rabbitdelay.web.options import User
from celery_rabbitdelay.web.pages import PAGES, Page
from celery_rabbitdelay.web.query import Term
from celery_rabbitdelay.web.site import Site
from celery_rabbitdelay.web.view_request import Fields, ViewRequest, fields_of, form_of

#: The header with an action's token; ``/api/session`` returns the token.
TOKEN_HEADER: Final = "X-Rabbitdelay-Token"  # noqa: S105 - a name

#: The answer to visitors that no option identifies.
UNIDENTIFIED: Final = (
    "The page does not know you. An option of rabbitdelay_web identifies users: 'users' lists "
    "names and passwords, 'proxy_header' trusts a proxy's header, 'identify' is a function of the "
    "application. Without any of them, only this machine is answered, and not through a proxy."
)


class Server:
    """Answers requests.

    Args:
        site: The readings and long actions that all requests share.
    """

    def __init__(self, site: Site) -> None:
        zone = site.app.timezone
        self._site = site
        self._access = access.Access(site)
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
            brief=shown.brief,
            left=shown.left,
            soon=lambda instant: shown.left(max(instant, wall_clock.now())),
            fullness=shown.fullness,
            number=lambda value: f"{value:,}",
            local=lambda instant: shown.local(instant, zone),
        )
        self._templates.globals.update(
            package_version=__version__,
            zone=str(zone),
            menu=[each for each in PAGES if each.in_menu],
            most_in_address=shown.MOST_IN_ADDRESS,
            term=lambda name, text: str(Term.of(name, text)),
            virtual_host=site.queues_broker.connection.virtual_host,
            prefix=site.delays.topology.prefix,
            has_sign_in=site.options.users is not None,
            plot=partial(charts.plot, zone=zone),
        )

    def application(self) -> ASGIApp:
        """Return the ASGI application; see :func:`celery_rabbitdelay.web.application`."""
        routes: list[Route | Mount] = [
            Route("/", self._first),
            Route("/sign-in", self._sign_in, methods=["POST"]),
            Route("/sign-out", self._sign_out, methods=["POST"]),
            Route("/api/session", self._session),
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
        return access.Shield(served, self._site.options)

    def _endpoint(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            visitor, user = await self._known(request)
            view_request = ViewRequest(self._site, user, fields_of(request.url.query.encode()))
            if page.is_action:
                form = await form_of(request)
                self._check_token(request, visitor, form)
                if not user.may_act:
                    name = shown.printable(user.name)
                    raise HTTPException(403, f"{name} is a viewer: only operators may act.")
                fields = [*view_request.fields.multi_items(), *form.multi_items()]
                view_request = replace(view_request, fields=Fields(fields))
            try:
                content = await run_in_threadpool(page.view, view_request)
            except AWAY as error:
                server = "Redis" if isinstance(error, RegistryUnavailable) else "The broker"
                raise HTTPException(503, f"{server} cannot be reached: {why(error)}") from error
            if _is_api(request):
                return _json(content)
            if "see" in content:
                return RedirectResponse(f"{_base(request)}/{content['see']}", 303)
            values = {"page": page, "request": view_request, **content}
            response = self._html(request, page.template, values, visitor)
            return self._with_session(request, visitor, response)

        return answer

    async def _known(self, request: Request) -> tuple[Visitor, User]:
        """Return the sender of a request, who is a known user.

        Raises:
            HTTPException: The sender is unknown.
        """
        visitor = await self._access.visitor(request)
        if visitor.user is not None:
            return visitor, visitor.user
        if self._site.options.users is None:
            raise HTTPException(403, UNIDENTIFIED)
        raise HTTPException(401, "Sign in first.")

    def _check_token(self, request: Request, visitor: Visitor, form: Fields) -> None:
        token = request.headers.get(TOKEN_HEADER) or form.get("token", "")
        name = visitor.user.name if visitor.user else ""
        if not self._access.sessions.is_token(token, visitor.session, name):
            text = "The form has expired: open its page again, or get a token from /api/session."
            raise HTTPException(403, text)

    async def _first(self, request: Request) -> Response:
        return RedirectResponse(f"{_base(request)}/now", 303)

    async def _session(self, request: Request) -> Response:
        visitor, user = await self._known(request)
        content = {"user": user.name, "role": user.role, "token": visitor.token}
        return self._with_session(request, visitor, _json(content))

    async def _sign_in(self, request: Request) -> Response:
        if self._site.options.users is None:
            raise HTTPException(404)
        form, sessions = await form_of(request), self._access.sessions
        before = sessions.read(request.cookies.get(access.SIGN_IN_COOKIE), access.SIGN_IN_COOKIE)
        known = sessions.read(request.cookies.get(access.KNOWN_COOKIE), access.KNOWN_COOKIE)
        address = request.client.host if request.client else ""
        name, password, path = (form.get(each, "") for each in ("name", "password", "next"))
        try:
            if before is None or not sessions.is_token(form.get("token", ""), before, ""):
                raise HTTPException(401, "The form has expired. Sign in again.")
            session = await self._access.signed_in(name, password, address, known)
        except HTTPException as refused:
            return self._sign_in_form(request, refused, path)
        # Only a path below our own, whatever the form contains.
        path = path.lstrip("/\\") or "now"
        response = RedirectResponse(f"{_base(request)}/{path}", 303)
        self._set_cookie(request, response, access.SIGN_IN_COOKIE, None)
        self._set_cookie(request, response, COOKIE, session)
        known = Session.new(session.name, session.proof)
        self._set_cookie(request, response, access.KNOWN_COOKIE, known)
        return response

    def _sign_in_form(self, request: Request, refused: HTTPException, path: str) -> Response:
        session = Session.new()
        token = self._access.sessions.token(session, "")
        values = {"why": refused.detail, "token": token, "next": path}
        response = self._html(request, "sign_in", values, status=refused.status_code)
        response.headers.update(refused.headers or {})
        self._set_cookie(request, response, access.SIGN_IN_COOKIE, session)
        return response

    async def _sign_out(self, request: Request) -> Response:
        visitor = await self._access.visitor(request)
        self._check_token(request, visitor, await form_of(request))
        if visitor.session.name:
            await run_in_threadpool(self._access.ended.add, visitor.session)
        response = await self._first(request)
        self._set_cookie(request, response, COOKIE, None)
        return response

    async def _failed(self, request: Request, error: Exception) -> Response:
        """Answer a refused request with its error."""
        assert isinstance(error, HTTPException)
        if error.status_code == 404 and _path(request) == "/":  # the mount's path without a slash
            return await self._first(request)
        if _is_api(request):
            return _json({"error": error.detail}, error.status_code)
        if error.status_code == 401:
            is_page = request.method in ("GET", "HEAD")  # signing in does not repeat an action
            path = _here(request).lstrip("/") if is_page else "now"
            return self._sign_in_form(request, HTTPException(401, ""), path)
        visitor = await self._access.visitor(request)
        values = {"why": error.detail, "error": error, "q": request.query_params.get("q", "")}
        return self._html(request, "error", values, visitor, error.status_code)

    async def _broken(self, request: Request, error: Exception) -> Response:
        """Answer a request that our own fault has broken; Starlette logs the fault."""
        failed = HTTPException(500, "An unexpected error. The server's log has the details.")
        return await self._failed(request, failed)

    def _html(
        self,
        request: Request,
        template: str,
        values: Mapping[str, object],
        visitor: Visitor | None = None,
        status: int = 200,
    ) -> HTMLResponse:
        shared = {
            "base": _base(request),
            "here": f"{_base(request)}{_here(request)}",
            "path": _path(request),
            "visitor": visitor if visitor and visitor.user else None,
            "page": None,
        }
        text = self._templates.get_template(f"{template}.html").render({**shared, **values})
        return HTMLResponse(text.encode("utf-8", "backslashreplace"), status)

    def _with_session(self, request: Request, visitor: Visitor, response: Response) -> Response:
        """Set the cookie of a new session, unless the request comes from another site.

        The browser may then have a session whose cookie it does not send: see
        :data:`SIGN_IN_COOKIE`.
        """
        comes_from_elsewhere = request.headers.get("sec-fetch-site") == "cross-site"
        if visitor.is_new and not comes_from_elsewhere:
            self._set_cookie(request, response, COOKIE, visitor.session)
        return response

    def _set_cookie(
        self, request: Request, response: Response, name: str, session: Session | None
    ) -> None:
        """Set a cookie to a session; None deletes it."""
        response.set_cookie(
            name,
            "" if session is None else self._access.sessions.written(session, name),
            max_age=0 if session is None else access.LASTS[name],
            path=_base(request) or "/",
            secure=self._site.options.https or request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )


def _base(request: Request) -> str:
    """Return the quoted path that the application is mounted at; empty for none."""
    return shown.quoted_path(request.scope.get("root_path", "").rstrip("/"))


def _path(request: Request) -> str:
    """Return the quoted path below the mount."""
    path: str = request.scope["path"]
    return shown.quoted_path(path.removeprefix(request.scope.get("root_path", "")) or "/")


def _here(request: Request) -> str:
    """Return the quoted path below the mount, with the query."""
    return f"{_path(request)}?{request.url.query}".removesuffix("?")


def _is_api(request: Request) -> bool:
    """Return whether a request asks for JSON."""
    return _path(request).startswith("/api/")


def _json(content: Mapping[str, object], status: int = 200) -> Response:
    # ASCII: a text may contain half of a surrogate pair.
    text = json.dumps(shown.plain(content))
    return Response(text, status, media_type="application/json")
