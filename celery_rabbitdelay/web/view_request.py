"""A view's input: the user, and the fields of the address or of the form."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from urllib.parse import parse_qsl, unquote, urlencode

from starlette.datastructures import ImmutableMultiDict
from starlette.exceptions import HTTPException
from starlette.requests import Request

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.exceptions import InvalidDelay, RabbitDelayError
from celery_rabbitdelay.levels.delay import milliseconds_of, parse_duration
from celery_rabbitdelay.levels.headers import is_digits
from celery_rabbitdelay.metrics.reading import why
from celery_rabbitdelay.web.options import User
from celery_rabbitdelay.web.site import Site

#: The response of pages about single tasks if no registry is configured.
NEEDS: Final = (
    "This needs the registry: pip install 'celery-rabbitdelay[registry]', set "
    "rabbitdelay_registry_url to the URL of a Redis, and rabbitdelay_track to 'all'"
)

#: The maximum number of fields, and of bytes, of a form.
MOST_FIELDS, MOST_BYTES = 2_000, 2**20

#: The prefix of form fields with URL-quoted values: browsers would change control characters in
#: unquoted values.
QUOTED: Final = "quoted-"


class Wrong(HTTPException):
    """A field has an invalid value.

    Args:
        name: The field's name.
        why: The values that the field takes.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(400, f"{name}: {why}")


class Fields(ImmutableMultiDict[str, str]):
    """The fields of an address or of a form; an empty field counts as missing.

    Args:
        pairs: The names and values.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        super().__init__([(name, value) for name, value in pairs if value.strip()])

    def needed(self, name: str) -> str:
        """Return the value of a field.

        Raises:
            Wrong: The field is missing.
        """
        value = self.get(name)
        if value is None:
            raise Wrong(name, "is missing")
        return value

    def one_of(self, name: str, words: Collection[str], default: str) -> str:
        """Return the value of a field that takes one of these words."""
        value = self.get(name, default)
        if value not in words:
            raise Wrong(name, f"takes one of {', '.join(words)}")
        return value

    def number(self, name: str, default: int, most: int) -> int:
        """Return the value of a field that takes a whole number from 1 to a maximum."""
        value = self.get(name, str(default))
        if not is_digits(value, most) or not int(value):
            raise Wrong(name, f"takes a number from 1 to {most:,}")
        return int(value)

    def address(self, **changed: str | None) -> str:
        """Return the fields as a query string, with changes; None removes a field."""
        kept = [(name, value) for name, value in self.multi_items() if name not in changed]
        new = [(name, value) for name, value in changed.items() if value is not None]
        return urlencode([*kept, *new], errors="surrogatepass")


@dataclass(frozen=True)
class ViewRequest:
    """One request.

    Attributes:
        site: The state that all requests share.
        user: The user who sent the request.
        fields: The fields of the address and of the form.
    """

    site: Site
    user: User
    fields: Fields

    @property
    def with_registry(self) -> RabbitDelay:
        """The application's delays, for views that need a registry.

        Raises:
            HTTPException: There is no registry.
        """
        try:
            self.site.delays.registry  # noqa: B018 - raises if there is no registry
        except RabbitDelayError as error:
            raise HTTPException(503, f"{NEEDS}. ({why(error)})") from error
        return self.site.delays

    def instant(self, name: str) -> datetime | None:
        """Return the instant in a field; the application's time zone is the default.

        Raises:
            Wrong: The value is not an instant.
        """
        value = self.fields.get(name)
        if value is None:
            return None
        try:
            found = datetime.fromisoformat(value)
            if found.tzinfo is None:
                found = found.replace(tzinfo=self.site.app.timezone)
            milliseconds_of(found.astimezone())
        except (ValueError, OverflowError) as wrong:
            raise Wrong(name, "takes an instant such as 2030-01-31T09:00") from wrong
        return found

    def duration(self, name: str) -> timedelta | None:
        """Return the length of time in a field; None if it is missing.

        Raises:
            Wrong: The value is not a length of time.
        """
        value = self.fields.get(name)
        try:
            return None if value is None else parse_duration(value, name)
        except InvalidDelay as wrong:
            raise Wrong(name, wrong.reason) from wrong


def fields_of(encoded: bytes) -> Fields:
    """Read the query of an address, or a form.

    Raises:
        HTTPException: The text is malformed, or has too many fields.
    """
    text = encoded.decode("latin-1")
    try:
        pairs = parse_qsl(text, errors="surrogatepass", max_num_fields=MOST_FIELDS)
        return Fields([_unquoted(*each) for each in pairs])
    except ValueError as wrong:  # also bytes that are not UTF-8
        raise HTTPException(400, "The address or the form cannot be read.") from wrong


def _unquoted(name: str, value: str) -> tuple[str, str]:
    if not name.startswith(QUOTED):
        return name, value
    return name.removeprefix(QUOTED), unquote(value, errors="surrogatepass")


async def form_of(request: Request) -> Fields:
    """Read a form.

    Raises:
        HTTPException: The body is not a form, too long, or malformed.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise HTTPException(415, "Send a form: application/x-www-form-urlencoded.")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise HTTPException(413, f"The form is longer than {MOST_BYTES:,} bytes.")
    return fields_of(body)
