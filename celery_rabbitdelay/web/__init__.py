"""The web page: shows waiting tasks and acts on them. Run ``celery rabbitdelay web``, or mount it.

This is the only package that serves a web page; its views call the same functions as the commands.
The extra ``web`` installs Starlette (routes, requests and tests of ASGI), Jinja2 (templates that
escape by default) and uvicorn (the command's server), because many FastAPI, Flask and Django
projects use them already. ``static`` contains htmx with its license. htmx only reloads a page and
replaces a part of it, so the pages also work without JavaScript.

Read ``options`` first (the options, and password hashes), then ``access`` (who sends a
request, and the headers of every response). ``site`` has the state that all requests share: cached
readings of the servers, and actions. A view takes a ``view_request.ViewRequest`` and
returns the content of its page and its JSON. The views are named like their pages: ``now`` (the
pages Now and Health), ``levels``, ``waiting``, ``deciding`` (cancel, postpone, run now),
``undeliverable`` and so on; ``pages`` lists all of them. ``query`` is the search language, and
``search`` runs a search. ``states`` determines which due tasks are held and which are overdue.
``problems`` lists the problems on the page Now, ``charts`` lays out bars and lines, ``shown``
escapes untrusted text, ``asgi`` makes the ASGI application, and ``command`` serves it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_rabbitdelay.web.options import User

if TYPE_CHECKING:
    from celery import Celery
    from starlette.types import ASGIApp

__all__ = ["User", "application"]


def application(app: Celery, **options: object) -> ASGIApp:
    """Return the page as an ASGI application, to serve or to mount at any path.

    Args:
        app: The Celery application. Its delayed tasks wait in RabbitMQ.
        **options: The fields of :class:`.Options`; they override the setting ``rabbitdelay_web``.

    Raises:
        ImportError: The extra is missing: ``pip install 'celery-rabbitdelay[web]'``.
        InvalidSetting: An option is unknown or invalid.
        TypeError: The application's delayed tasks do not wait in RabbitMQ.
    """
    try:
        from celery_rabbitdelay.web.asgi import Server  # needs the extra
        from celery_rabbitdelay.web.site import Site
    except ImportError as missing:
        raise ImportError(
            f"the page needs {missing.name}: pip install 'celery-rabbitdelay[web]'"
        ) from missing
    return Server(Site(app, options)).application()
