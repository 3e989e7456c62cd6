"""What a command prints with ``--json``, checked against its schema in ``tests/schemas``."""

import json
from pathlib import Path
from typing import Any, Final

from jsonschema import Draft202012Validator

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
