"""The ASGI application: each page as HTML and as JSON, signing in and out, and errors."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

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
from celery_rabbitdelay.web import shown
from celery_rabbitdelay.web.access import PAUSE, Access, NotSignedIn, TooManyAttempts, Visitor
from celery_rabbitdelay.web.asked import Asked, Fields, fields_of, form_of
from celery_rabbitdelay.web.pages import PAGES, Page
from celery_rabbitdelay.web.polled import Polled
from celery_rabbitdelay.web.sessions import (
    COOKIE,
    KNOWN_COOKIE,
    LASTS,
    SIGN_IN_COOKIE,
    Session,
)
from celery_rabbitdelay.web.shield import Shield
from celery_rabbitdelay.web.site import Site

logger = logging.getLogger(__name__)

_Endpoint = Callable[[Request], Awaitable[Response]]

#: The header of an action's token; ``/api/session`` returns the token.
TOKEN_HEADER: Final = "X-Rabbitdelay-Token"  # noqa: S105 - a name

#: What visitors read whom the page does not know.
NOBODY: Final = (
    "It is not known who you are. The option 'users' of rabbitdelay_web says who may sign in, "
    "'proxy_header' names the header of a trusted proxy, and 'identify' is a function of the "
    "application's; with none of them, only this machine is answered, and not through a proxy."
)


def application_for(site: Site) -> ASGIApp:
    """Return the page as an ASGI application; see :func:`celery_rabbitdelay.web.application`."""
    return Shield(Server(site).starlette(), site.options)


class Server:
    """Answers requests.

    Args:
        site: The readings and long actions that all requests share.
    """

    def __init__(self, site: Site) -> None:
        zone: Any = site.app.timezone
        self._site = site
        self._access = Access(site)
        self._polled = Polled()
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
            fullness=shown.fullness,
            number=lambda value: f"{value:,}",
            local=lambda instant: shown.local(instant, zone),
        )
        self._templates.globals.update(
            package_version=__version__,
            zone=str(zone),
            menu=[each for each in PAGES if each.in_menu],
            most_in_address=shown.MOST_IN_ADDRESS,
        )

    def starlette(self) -> Starlette:
        """Return the routes."""
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
        served.router.redirect_slashes = False  # it believes what the request says in Host
        return served

    def _endpoint(self, page: Page) -> _Endpoint:
        async def answer(request: Request) -> Response:
            visitor = await self._access.visitor(request)
            if visitor.user is None:
                return self._unknown(request)
            asked = Asked(self._site, visitor.user, fields_of(request.url.query.encode()))
            if page.is_action:
                form = await form_of(request)
                self._check_token(request, visitor, form)
                if not visitor.user.may_act:
                    name = shown.printable(visitor.user.name)
                    raise HTTPException(403, f"The role of {name} is viewer.")
                asked = replace(asked, fields=Fields([*form.pairs, *asked.fields.pairs]))
            told = await run_in_threadpool(self._polled.told, page, asked, request)
            if is_api(request):
                return _json(told)
            if page.file:
                return _file(told["messages"], page.file)
            if "see" in told:
                return RedirectResponse(f"{base_of(request)}/{told['see']}", 303)
            response = self._html(request, page.template, visitor, page=page, asked=asked, **told)
            return self._with_session(request, visitor, response)

        return answer

    def _check_token(self, request: Request, visitor: Visitor, form: Fields) -> None:
        token = request.headers.get(TOKEN_HEADER) or form.text("token") or ""
        name = visitor.user.name if visitor.user else ""
        if not self._access.sessions.is_token(token, visitor.session, name):
            raise HTTPException(
                403,
                "The token is not that of the cookie: take both from /api/session."
                if is_api(request)
                else "The form is too old: open its page again.",
            )

    async def _first(self, request: Request) -> Response:
        return RedirectResponse(f"{base_of(request)}/now", 303)

    async def _session(self, request: Request) -> Response:
        visitor = await self._access.visitor(request)
        if visitor.user is None:
            return self._unknown(request)
        told = {"user": visitor.user.name, "role": visitor.user.role, "token": visitor.token}
        return self._with_session(request, visitor, _json(told))

    async def _sign_in(self, request: Request) -> Response:
        if not self._access.has_sign_in:
            raise HTTPException(404)
        form, sessions = await form_of(request), self._access.sessions
        before = sessions.read(request.cookies.get(SIGN_IN_COOKIE), SIGN_IN_COOKIE)
        known = sessions.read(request.cookies.get(KNOWN_COOKIE), KNOWN_COOKIE)
        address = request.client.host if request.client else ""
        name, password = form.text("name") or "", form.text("password") or ""
        try:
            if before is None or not sessions.is_token(form.text("token") or "", before, ""):
                raise NotSignedIn("The form was too old.")
            session = await self._access.signed_in(name, password, address, known)
        except TooManyAttempts as wrong:
            response = self._unknown(request, str(wrong), form.text("next"), 429)
            response.headers["Retry-After"] = f"{PAUSE:.0f}"
            return response
        except NotSignedIn as wrong:
            return self._unknown(request, str(wrong), form.text("next"))
        # Below our own path, wherever the form says.
        path = (form.text("next") or "").lstrip("/\\") or "now"
        response = RedirectResponse(f"{base_of(request)}/{path}", 303)
        response.delete_cookie(SIGN_IN_COOKIE, **self._cookie(request))
        self._set_cookie(request, response, COOKIE, session)
        self._set_cookie(request, response, KNOWN_COOKIE, Session.new(session.name, session.proof))
        return response

    async def _sign_out(self, request: Request) -> Response:
        visitor = await self._access.visitor(request)
        self._check_token(request, visitor, await form_of(request))
        if visitor.session.name:
            await run_in_threadpool(self._access.ended.add, visitor.session)
        response = RedirectResponse(f"{base_of(request)}/now", 303)
        response.delete_cookie(COOKIE, **self._cookie(request))
        return response

    def _unknown(
        self, request: Request, why: str = "", where: str | None = None, status: int = 401
    ) -> Response:
        """Answer somebody who is not known: with the form for signing in, if there is one."""
        if not self._access.has_sign_in:
            raise HTTPException(403, NOBODY)
        if is_api(request):
            raise HTTPException(401, "Sign in first.")
        session = Session.new()
        is_page = request.method in ("GET", "HEAD")  # an action is not done by signing in
        next_page = here_of(request).lstrip("/") if is_page else "now"
        response = self._html(
            request,
            "sign_in.html",
            None,
            status,
            why=why,
            token=self._access.sessions.token(session, ""),
            next=where if where is not None else next_page,
        )
        self._set_cookie(request, response, SIGN_IN_COOKIE, session)
        return response

    async def _failed(self, request: Request, error: Exception) -> Response:
        """Answer a request that cannot be answered as it is."""
        assert isinstance(error, HTTPException)
        path = path_of(request)
        lacks_slash = request.scope["path"] in ("", request.scope.get("root_path", ""))
        if error.status_code == 404 and (lacks_slash or (path != "/" and path.endswith("/"))):
            query = here_of(request).removeprefix(path)
            return RedirectResponse(f"{base_of(request)}/{path.strip('/')}{query}")
        if is_api(request):
            return _json({"error": error.detail}, error.status_code)
        visitor = await self._access.visitor(request)
        known = visitor if visitor.user is not None else None
        return self._html(
            request, "error.html", known, error.status_code, why=error.detail, error=error
        )

    async def _broken(self, request: Request, error: Exception) -> Response:
        """Answer a request that has met a mistake of ours; the log has it."""
        failed = HTTPException(500, "An unexpected error, which is in the log of the server.")
        return await self._failed(request, failed)

    def _html(
        self,
        request: Request,
        template: str,
        visitor: Visitor | None,
        status: int = 200,
        **values: Any,
    ) -> HTMLResponse:
        shared = {
            "base": base_of(request),
            "here": f"{base_of(request)}{here_of(request)}",
            "path": path_of(request),
            "visitor": visitor,
            "has_sign_in": self._access.has_sign_in,
            "page": None,
        }
        text = self._templates.get_template(template).render({**shared, **values})
        return HTMLResponse(text.encode("utf-8", "backslashreplace"), status)

    def _with_session(self, request: Request, visitor: Visitor, response: Response) -> Response:
        """Give a browser its session, unless it keeps one from us; see :data:`SIGN_IN_COOKIE`."""
        comes_from_elsewhere = request.headers.get("sec-fetch-site") == "cross-site"
        if visitor.is_new and not comes_from_elsewhere:
            self._set_cookie(request, response, COOKIE, visitor.session)
        return response

    def _set_cookie(
        self, request: Request, response: Response, name: str, session: Session
    ) -> None:
        value = self._access.sessions.written(session, name)
        response.set_cookie(name, value, max_age=LASTS[name], **self._cookie(request))

    def _cookie(self, request: Request) -> Any:
        secure = self._site.options.https or request.url.scheme == "https"
        path = base_of(request) or "/"
        return {"path": path, "secure": secure, "httponly": True, "samesite": "strict"}


def base_of(request: Request) -> str:
    """Return the path that the application is mounted at, quoted; empty for none."""
    root: str = request.scope.get("root_path", "")
    return shown.quoted_path(root.rstrip("/"))


def path_of(request: Request) -> str:
    """Return the path below that, quoted."""
    root: str = request.scope.get("root_path", "")
    path: str = request.scope["path"]
    return shown.quoted_path(path.removeprefix(root) or "/")


def here_of(request: Request) -> str:
    """Return the path below that, quoted, and the query."""
    query = f"?{request.url.query}" if request.url.query else ""
    return f"{path_of(request)}{query}"


def is_api(request: Request) -> bool:
    """Return whether a request asks for JSON."""
    return path_of(request).startswith("/api/")


def _json(told: Mapping[str, Any], status: int = 200) -> Response:
    # ASCII: a text may hold half of a surrogate pair.
    text = json.dumps(shown.plain(told))
    return Response(text, status, media_type="application/json")


def _file(lines: Sequence[Mapping[str, Any]], name: str) -> Response:
    """Return a file with a line of JSON for each object."""
    text = "".join(f"{json.dumps(each)}\n" for each in lines)
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(text, media_type="application/x-ndjson", headers=headers)
