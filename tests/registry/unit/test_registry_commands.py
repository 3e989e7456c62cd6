"""What the registry's commands take."""

import click
import pytest

from celery_rabbitdelay.registry.commands import instant_type


def test_an_instant_at_the_end_of_the_calendar_is_refused() -> None:
    text = "9999-12-31T23:59:59-12:00"
    with pytest.raises(click.BadParameter, match=f"{text}': takes a datetime or ISO 8601"):
        instant_type.convert(text, None, None)
