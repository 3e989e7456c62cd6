"""The JSON that commands print, as JSON schemas (draft 2020-12), one file for each command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator


def validated(text: str, schema: str) -> Any:
    """Return the only JSON value in a text, which a schema accepts.

    Args:
        text: What a command has printed.
        schema: The name of a file in this folder, without its end.
    """
    value = json.loads(text)
    file = Path(__file__).parent / f"{schema}.json"
    Draft202012Validator(json.loads(file.read_text())).validate(value)
    return value
