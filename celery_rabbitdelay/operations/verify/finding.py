"""What ``verify`` has found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

#: ``danger``: tasks are lost, early, late by minutes, run twice, or cannot be sent. ``warning``:
#: they are as soon as something else happens, or something is slower than it could be. ``note``:
#: good to know; nothing happens before somebody changes something.
Severity: TypeAlias = Literal["danger", "warning", "note"]

#: How many subjects a text names.
MAX_NAMED: Final = 3


class Finding(NamedTuple):
    """One fault, with everything that it concerns.

    Attributes:
        severity: How bad it is.
        code: A word for programs, such as ``policy-expires``; it keeps its meaning.
        subjects: What it concerns, as ``queue rabbitdelay.hours.7``.
        what: What was found.
        consequence: What happens to tasks.
        remedy: What to do about it.
    """

    severity: Severity
    code: str
    subjects: tuple[str, ...]
    what: str
    consequence: str
    remedy: str


class Report(NamedTuple):
    """The result of ``verify``.

    Attributes:
        version: The broker's version.
        prefix: The prefix of the topology.
        findings: What was found, the worst first.
        not_seen: What could not be looked at, and why.
    """

    version: str
    prefix: str
    findings: tuple[Finding, ...]
    not_seen: tuple[str, ...]

    def count(self, severity: Severity) -> int:
        """Return how many findings have a severity."""
        return sum(finding.severity == severity for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON can express it."""
        return {
            "version": self.version,
            "prefix": self.prefix,
            "danger": self.count("danger"),
            "warning": self.count("warning"),
            "note": self.count("note"),
            "findings": [
                {**finding._asdict(), "subjects": list(finding.subjects)}
                for finding in self.findings
            ],
            "not_seen": list(self.not_seen),
        }


def named(subjects: tuple[str, ...]) -> str:
    """Return the subjects as text, of many only the first ones."""
    shown = ", ".join(subjects[:MAX_NAMED])
    more = len(subjects) - MAX_NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return one finding for all that differ in their subjects alone, the worst first."""
    subjects: dict[Finding, dict[str, None]] = {}
    for finding in findings:
        same = subjects.setdefault(finding._replace(subjects=()), {})
        same.update(dict.fromkeys(finding.subjects))
    together = [each._replace(subjects=tuple(names)) for each, names in subjects.items()]
    return tuple(sorted(together, key=lambda each: get_args(Severity).index(each.severity)))
