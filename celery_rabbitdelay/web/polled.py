"""Refreshes of open pages: one look for all who have the same page open."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from threading import Lock
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request

from celery_rabbitdelay.web.asked import Asked
from celery_rabbitdelay.web.pages import Page
from celery_rabbitdelay.web.reading import Readings

#: The header that the script of the page sends when it refreshes a page.
HEADER: Final = "HX-Request"

#: How many addresses are remembered.
REMEMBERED: Final = 500


class Polled:
    """Answers refreshes: for each address a view is called at most twice in its period.

    However many people have a page open, its servers are asked as often as for one. What a person
    opens or clicks is always looked up.
    """

    def __init__(self) -> None:
        self._shared: OrderedDict[object, Readings[dict[str, Any] | HTTPException]] = OrderedDict()
        self._lock = Lock()

    def told(self, page: Page, asked: Asked, request: Request) -> dict[str, Any]:
        """Return what a page shows.

        Args:
            page: The page.
            asked: What its view gets; what it returns must not depend on the user.
            request: Says whether it is a refresh.

        Raises:
            HTTPException: The view has raised it.
        """
        if not page.refresh or HEADER not in request.headers:
            return page.view(asked)
        told = self._readings(page, asked).latest().value
        if told is None or isinstance(told, HTTPException):
            raise told or HTTPException(503)
        return told

    def _readings(self, page: Page, asked: Asked) -> Readings[dict[str, Any] | HTTPException]:
        key = (page.path, *asked.fields.pairs)
        with self._lock:
            if key not in self._shared:
                self._shared[key] = Readings(partial(_look, page, asked), page.refresh / 2)
            self._shared.move_to_end(key)
            while len(self._shared) > REMEMBERED:
                self._shared.popitem(last=False)
            return self._shared[key]


def _look(page: Page, asked: Asked) -> dict[str, Any] | HTTPException:
    try:
        return page.view(asked)
    except HTTPException as refused:
        return refused
