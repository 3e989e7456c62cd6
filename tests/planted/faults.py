"""Faults that a test has to notice: each takes one promise away.

A file here for each room, ``ROOM.toml``, lists them::

    [[fault]]
    breaks = "A message is acknowledged only after it was confirmed."
    file = "modules/service.py"
    from = "the text in that file, which stands there once"
    to = "what breaks the promise"
    tests = "tests/kernel/integration/test_modules.py -k confirm"
"""

import tomllib
from pathlib import Path
from typing import Final, NamedTuple

from tests.project_copy import REPOSITORY

PACKAGE: Final = REPOSITORY / "celery_rabbitdelay"


class Fault(NamedTuple):
    """A fault in the package.

    Attributes:
        breaks: The promise that it breaks.
        file: The file, relative to the package.
        before: A text that stands there once.
        after: What stands there instead.
        tests: The arguments for pytest of the tests that have to notice.
    """

    breaks: str
    file: str
    before: str
    after: str
    tests: str

    def planted(self) -> str:
        """Return the text of its file with the fault.

        Raises:
            ValueError: What it replaces does not stand there once.
        """
        text = (PACKAGE / self.file).read_text()
        if text.count(self.before) != 1:
            raise ValueError(f"{self.file} has {text.count(self.before)} times {self.before!r}")
        return text.replace(self.before, self.after)


def faults(*rooms: str) -> list[Fault]:
    """Return the faults of some rooms; of all by default."""
    names = rooms or sorted(path.stem for path in Path(__file__).parent.glob("*.toml"))
    return [
        Fault(each["breaks"], each["file"], each["from"], each["to"], each["tests"])
        for name in names
        for each in tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text())["fault"]
    ]
