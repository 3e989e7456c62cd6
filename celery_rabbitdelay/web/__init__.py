"""A page that shows what waits, and lets one act on it: ``celery rabbitdelay web``, or mounted.

HTTP comes in here, and nowhere else: everything else is called as the commands call it. Starlette
(routes, requests and tests of ASGI), Jinja2 (templates that escape by default), itsdangerous
(signed cookies) and uvicorn (the server of the command) are the extra ``web``, chosen because
FastAPI, Flask and Django users run most of them already; htmx, in ``static`` with its licence, only
fetches a page again and replaces a part of it, so that a page works without it.

Read ``options`` (the options, and hashes of passwords), then ``access`` (the sender of a request:
sessions, cookies, tokens of forms; and what every request and answer has to have). ``site`` is what
all requests share: cached readings of the servers, and long actions. ``asked`` is what a view gets;
it returns what its page and its JSON show. The views are ``now`` (Now, Health), ``levels``,
``waiting``, ``deciding`` (cancel, postpone, run now), ``undeliverable`` and so on, each named like
its page; ``pages`` is the table of them. ``query`` is the language of the search for tasks, and
``search`` runs it. ``states`` is the one rule of which due tasks are held or overdue. ``problems``
says what is wrong, and ``charts`` where the bars and lines of a picture stand. ``shown`` renders
texts that anybody may have written, ``asgi`` makes the application, and ``command`` serves it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_rabbitdelay.web.options import User

if TYPE_CHECKING:
    from celery import Celery
    from starlette.types import ASGIApp

__all__ = ["User", "application"]


def application(app: Celery, **options: object) -> ASGIApp:
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
