"""Times, usage errors of all commands, and the version."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import click
import pytest
from click.testing import Result

from celery_rabbitdelay import __version__
from celery_rabbitdelay.app import additions
from celery_rabbitdelay.command.group import rabbitdelay
from celery_rabbitdelay.command.shared import seconds_type

PACKAGE = "celery_rabbitdelay"


#: How times are written, by the type of the option.
FORMS = {
    "delay": ["90", "1h30m", "1.5d", "-5"],
    "duration": ["90", "1h30m", "1.5d"],
    "instant": ["2030-01-31T09:00:00+01:00", "2030-01-31 09:00", "2030-01-31"],
}


def parameters(commands: click.Group) -> Iterator[click.Parameter]:
    """Yield the parameters of all commands."""
    context = click.Context(commands)
    for name in commands.list_commands(context):
        command = commands.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from parameters(command)
        else:
            yield from command.params


def test_all_commands_take_times_in_the_same_forms() -> None:
    for each in parameters(rabbitdelay):
        # A plain number of seconds would be another form.
        assert each.type.name != "float"
        for text in FORMS.get(each.type.name, ()):
            assert each.type.convert(text, each, None)
        if each.type.name in FORMS:
            with pytest.raises(click.BadParameter, match=rf"{each.name} 'soon': takes .*\d"):
                each.type.convert("soon", each, None)
    for text, takes in (
        ("0", "a duration above 0 to 100 years"),
        ("99999999999d", "a duration from 0 to 100 years"),
    ):
        with pytest.raises(click.BadParameter, match=f"{text}': takes {takes}"):
            seconds_type.convert(text, None, None)


@click.command()
def greet() -> None:
    """Say hello."""
    click.echo("hello")


def test_a_command_is_named_by_text_and_a_missing_addition_is_said(
    offline: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(additions.commands, "greet", f"{__name__}:greet")
    monkeypatch.setitem(additions.commands, "gone", "celery_rabbitdelay.gone.commands:gone")
    assert offline("greet").stdout == "hello\n"
    listed = offline("--help").stdout
    assert re.search(r"^  greet +Say hello\.$", listed, re.MULTILINE)
    assert "gone" not in listed
    told = offline("gone")
    assert told.exit_code == 1
    assert "has no folder 'gone'" in " ".join(told.output.split())


def test_the_group_imports_no_addition() -> None:
    program = "import sys, celery_rabbitdelay.command.group; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    rooms = {name.split(".")[1] for name in run.stdout.split() if name.startswith(f"{PACKAGE}.")}
    assert rooms.isdisjoint({"operations", "schedules", "spark", "testing", "web"})


def test_celery_says_which_version_this_is(offline: Callable[..., Result]) -> None:
    assert offline("--version").stdout == f"celery-rabbitdelay, version {__version__}\n"
