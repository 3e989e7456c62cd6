"""A fake: what Terraform makes of an exported module, played by hand on the parsed HCL.

It knows only the expressions that the module uses: references, templates of references, and
``jsonencode``. Any other fails.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import hcl2  # type: ignore[import-untyped,unused-ignore]

_REFERENCE: Final = re.compile(r"\$\{([\w.]+)\}")
_ENCODED: Final = re.compile(r"\$\{jsonencode\(([\w.]+)\)\}")


class Module:
    """A parsed module, and its inputs.

    Args:
        text: The text of ``main.tf``.
        **inputs: Values of its variables; the others have their defaults.
    """

    def __init__(self, text: str, **inputs: Any) -> None:
        parsed = _unquoted(hcl2.loads(text))
        (self.settings,) = parsed["terraform"]
        self.variables = {
            name: each for block in parsed["variable"] for name, each in block.items()
        }
        (self.output,) = parsed["output"]
        defaults = {name: each["default"] for name, each in self.variables.items()}
        self._scope: dict[str, Any] = {"var": {**defaults, **inputs}}
        (found,) = parsed["locals"]
        self._scope["local"] = {name: self._value(each, {}) for name, each in found.items()}
        self._resources = parsed["resource"]

    def resources(self, kind: str) -> list[dict[str, Any]]:
        """Return the arguments of every resource of a kind, each as often as ``for_each`` says."""
        found = []
        for block in self._resources:
            for own in block.get(kind, {}).values():
                arguments = dict(own)
                arguments.pop("depends_on", None)
                entries = self._value(arguments.pop("for_each", "none"), {})
                each = entries.items() if isinstance(entries, dict) else [(None, None)]
                for key, value in each:
                    scope = {"each": {"key": key, "value": value}}
                    found.append(self._value(arguments, scope))
        return found

    def order(self) -> dict[str, list[str]]:
        """Return what each resource waits for."""
        return {
            f"{kind}.{name}": [re.sub(r"\$\{(.*)\}", r"\1", each) for each in own["depends_on"]]
            for block in self._resources
            for kind, named in block.items()
            for name, own in named.items()
            if "depends_on" in own
        }

    def _value(self, value: Any, scope: dict[str, Any]) -> Any:
        if isinstance(value, dict):
            return {key: self._value(each, scope) for key, each in value.items()}
        if isinstance(value, list):
            return [self._value(each, scope) for each in value]
        if not isinstance(value, str):
            return value
        if encoded := _ENCODED.fullmatch(value):
            return json.dumps(self._refer(encoded[1], scope))
        if whole := _REFERENCE.fullmatch(value):
            return self._refer(whole[1], scope)
        text = _REFERENCE.sub(lambda found: str(self._refer(found[1], scope)), value)
        assert "${" not in text, f"this model does not know {value}"
        return text

    def _refer(self, path: str, scope: dict[str, Any]) -> Any:
        value: Any = {**self._scope, **scope}
        for word in path.split("."):
            value = value[word]
        return value


def _unquoted(value: Any) -> Any:
    """Return what the parser found, without the quotation marks and its own marks."""
    if isinstance(value, dict):
        return {
            _unquoted(key): _unquoted(each)
            for key, each in value.items()
            if not key.startswith("__")
        }
    if isinstance(value, list):
        return [_unquoted(each) for each in value]
    if isinstance(value, str) and len(value) > 1 and value.startswith('"') and value.endswith('"'):
        return json.loads(value)
    return value
