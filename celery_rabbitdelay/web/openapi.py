"""The OpenAPI description of the JSON, made from the table of pages."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

from celery_rabbitdelay import __version__
from celery_rabbitdelay.web.pages import Page, Parameter

#: The header of an action's token; ``/api/session`` says which.
TOKEN_HEADER: Final = "X-Rabbitdelay-Token"  # noqa: S105 - a name

_TOKEN: Final = {
    "name": TOKEN_HEADER,
    "in": "header",
    "required": True,
    "description": "the token that /api/session says",
    "schema": {"type": "string"},
}

_ERRORS: Final = {
    "400": "a field cannot be read",
    "401": "nobody has signed in",
    "403": "the user may not do this, or the token is missing",
    "503": "a server cannot be asked, or an extra is missing; 'error' says why",
}

_ERROR: Final = {
    "type": "object",
    "properties": {"error": {"type": "string"}},
    "required": ["error"],
}


def openapi(pages: Sequence[Page], base: str) -> dict[str, Any]:
    """Return the description.

    Args:
        pages: The pages.
        base: The path that the application is mounted at.
    """
    return {
        "openapi": "3.1.0",
        "info": {"title": "celery_rabbitdelay: what waits", "version": __version__},
        "servers": [{"url": f"{base}/api"}],
        "paths": {
            "/session": {"get": _operation("Who asks, and the token for actions.")},
            **{f"/{each.path}": _path(each) for each in pages},
        },
    }


def _path(page: Page) -> dict[str, Any]:
    operation = _operation((inspect.getdoc(page.view) or "").partition("\n")[0])
    if not page.is_action:
        operation["parameters"] = [
            {
                "name": each.name,
                "in": "query",
                "description": each.meaning,
                "required": each.is_needed,
                "schema": _schema(each),
            }
            for each in page.parameters
        ]
        return {"get": operation}
    schema = {
        "type": "object",
        "properties": {
            each.name: {**_schema(each), "description": each.meaning} for each in page.parameters
        },
        "required": [each.name for each in page.parameters if each.is_needed],
    }
    operation["parameters"] = [_TOKEN]
    operation["requestBody"] = {
        "required": True,
        "content": {"application/x-www-form-urlencoded": {"schema": schema}},
    }
    return {"post": operation}


def _operation(summary: str) -> dict[str, Any]:
    return {
        "summary": summary,
        "responses": {
            "200": _answer("what the page shows", {"type": "object"}),
            **{status: _answer(meaning, _ERROR) for status, meaning in _ERRORS.items()},
        },
    }


def _answer(description: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _schema(parameter: Parameter) -> dict[str, Any]:
    one: dict[str, Any] = {"type": "string"}
    if parameter.words:
        one["enum"] = list(parameter.words)
    return {"type": "array", "items": one} if parameter.is_list else one
