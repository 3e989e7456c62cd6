"""A page that shows what waits, and lets one act on it: ``celery rabbitdelay web``, or mounted.

HTTP comes in here, and nowhere else: everything else is called as the commands call it. Starlette
(routes, requests and tests of ASGI), Jinja2 (templates that escape by default), itsdangerous
(signed cookies) and uvicorn (the server of the command) are the extra ``web``, chosen because
FastAPI, Flask and Django users run most of them already; htmx, in ``static`` with its licence, only
fetches a page again and replaces a part of it, so that a page works without it.

Read ``options`` (what may be configured), then who may: ``passwords``, ``sessions`` (cookies, and
the tokens of forms), ``access`` (the ways to know a user) and ``shield`` (what every request and
every answer has to have). ``reading`` shares one look at a server among all viewers, ``site`` holds
these readings, ``asked`` is what a view gets. Each view returns what its page and its JSON show:
``now``, ``waiting``, ``deciding`` (cancel, postpone, run now; ``work`` is what takes long),
``workers``, ``health`` and others. ``pages`` is the table of them, ``shown`` renders
texts that anybody may have written, and ``asgi`` makes the application, which ``serve`` serves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_rabbitdelay.web.options import User

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["User", "application"]


def application(app: Celery, **options: Any) -> Any:
    """Return the page as an ASGI application, to be served or mounted at any path.

    Args:
        app: The Celery application, whose delays wait in RabbitMQ.
        **options: The fields of :class:`.Options`; they override those of the setting
            ``rabbitdelay_web``.

    Raises:
        ImportError: The extra is missing: ``pip install 'celery-rabbitdelay[web]'``.
        InvalidSetting: An option is unknown or wrong.
        TypeError: The delays of the application are not in RabbitMQ.
    """
    try:
        from celery_rabbitdelay.web.asgi import application_for  # needs the extra
        from celery_rabbitdelay.web.site import Site
    except ImportError as missing:
        raise ImportError(
            f"the page needs {missing.name}: pip install 'celery-rabbitdelay[web]'"
        ) from missing
    return application_for(Site(app, options))
