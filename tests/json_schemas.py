"""A command in this process, and what it prints with ``--json``, checked against its schema."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from celery.bin.base import CLIContext
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

from celery_rabbitdelay.command.group import rabbitdelay

SCHEMAS: Final = Path(__file__).parent / "schemas"


def checked(command: str, printed: str) -> dict[str, Any]:
    """Return the one JSON object that a command has printed.

    Args:
        command: The name of the command, and of its schema.
        printed: Its standard output.

    Raises:
        jsonschema.ValidationError: The schema does not allow it.
    """
    schema = json.loads((SCHEMAS / f"{command}.json").read_text())
    Draft202012Validator.check_schema(schema)
    assert schema["additionalProperties"] is False
    found: dict[str, Any] = json.loads(printed)
    Draft202012Validator(schema).validate(found)
    return found


def invoke(app: Any, arguments: Sequence[str], given: str = "") -> Result:
    """Run a command of ``celery rabbitdelay`` for an application, in this process.

    Args:
        app: The application.
        arguments: The command, and its arguments.
        given: Its standard input.
    """
    context = CLIContext(app=app, no_color=True, workdir=None, quiet=False)
    return CliRunner().invoke(rabbitdelay, arguments, given, obj=context)
