"""What a command prints on a wrong command line, a wrong setting and an error: no traceback."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from click.testing import Result

#: Settings with a registry, which is not asked.
REGISTRY = {"rabbitdelay_registry_url": "redis://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("command", "settings", "says"),
    [
        ("status", {"rabbitdelay_tick": "soon"}, "rabbitdelay_tick"),
        ("verify --management amqp://guest:secret@host", {}, "use one such as http://host:15672"),
        ("delete", {}, "pass --yes"),
        ("migrate --from-layout [[", {}, "is not JSON"),
        ("migrate --from-layout hexadecimal", {}, "rabbitdelay_layout"),
        ("migrate --rate 0", {}, "--rate"),
        ("migrate --from-prefix old", REGISTRY, "cancelled tasks would run"),
        ("undeliverable redrive --to x.celery.pidbox", {}, "is reserved for the delay levels"),
        ("undeliverable purge", {}, "pass --yes"),
        ("pause --task x --queue y", REGISTRY, "pass exactly one of --task and --queue"),
        ("resume --task=", REGISTRY, "pass exactly one of --task and --queue"),
        ("postpone x", REGISTRY, "pass exactly one of --delay and --eta"),
        ("show x --key y", REGISTRY, "pass either task ids or --key, not both"),
        *(
            (command, {}, "set rabbitdelay_registry_url")
            for command in ("pending", "cancel --search task:x -y", "job show x", "schedules list")
        ),
    ],
)
def test_what_is_wrong_in_a_command_line_or_a_setting_is_a_usage_error(
    offline: Callable[..., Result], command: str, settings: dict[str, Any], says: str
) -> None:
    told = offline(*command.split(), "--json", **settings)
    assert (told.exit_code, told.stdout) == (2, "")
    assert says in " ".join(told.stderr.split())
    assert "secret" not in told.stderr


@pytest.mark.parametrize("error", [OSError, ValueError])
def test_an_error_shows_no_password_whoever_wrote_its_text(
    offline: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    refused = mock.Mock(side_effect=error("no way to amqp://guest:secret@host\nat all"))
    monkeypatch.setattr("celery_rabbitdelay.operations.status.status_of", refused)
    told = offline("status", "--json")
    (line,) = told.stderr.splitlines()
    assert "no way to amqp://guest:**@host at all" in line
    assert "secret" not in told.output
