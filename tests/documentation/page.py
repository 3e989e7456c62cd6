"""The code blocks of a Markdown page, with the markers that say what becomes of each. Pure."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from markdown_it import MarkdownIt

#: Languages whose blocks are run.
RUN: Final = ("python", "pycon", "console")

#: Languages whose blocks are read by a parser.
PARSED: Final = ("json", "toml")

#: What a program prints, and drawings made of characters.
OUTPUT: Final = ("text",)

#: A comment that marks the block below it, or holds code that readers do not see.
_MARKER: Final = re.compile(r"<!--\s*(not run|run|file|from):(.*)-->\s*", re.DOTALL)


class WrongPage(Exception):
    """A block is neither run nor marked, or its marker is wrong; the message says where."""


@dataclass(frozen=True)
class Block:
    """Something that is done at its place in a page.

    Attributes:
        page: The file.
        line: The number of its first line, from 1.
        action: ``python``, ``pycon`` and ``console``: run it; ``json`` and ``toml``: parse it;
            ``file``: save it; ``from``: find it in a source of this repository, which other
            tests run; ``not run``: nothing.
        code: Its text.
        argument: The name of the file, the source, or the reason why it is not run.
    """

    page: Path
    line: int
    action: str
    code: str
    argument: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Return the code blocks of a page, hidden ones too, in their order.

    Raises:
        WrongPage: A block has no language that is known here, or a marker no reason or no block.
    """
    return list(_blocks(page))


def _blocks(page: Path) -> Iterator[Block]:
    marker: Block | None = None
    for token in MarkdownIt("commonmark").parse(page.read_text()):
        if token.type == "html_block" and (found := _MARKER.fullmatch(token.content)):
            _refuse_lonely(marker)
            marker = _marker(page, _line(token.map), found)
            if marker.code:
                yield marker
                marker = None
        elif token.type == "fence":
            block = _fence(page, _line(token.map) + 1, token.info, token.content, marker)
            marker = None
            if block is not None:
                yield block
        elif token.type == "code_block":
            raise WrongPage(f"{page}:{_line(token.map)}: fence the block and name its language")
        else:
            _refuse_lonely(marker)
            marker = None
    _refuse_lonely(marker)


def _line(lines: list[int] | None) -> int:
    assert lines is not None
    return lines[0] + 1


def _refuse_lonely(marker: Block | None) -> None:
    if marker is not None:
        raise WrongPage(f"{marker}: the marker stands right above no code block")


def _marker(page: Path, line: int, found: re.Match[str]) -> Block:
    """What a comment says: of the block below, or, where it has several lines, of its own code."""
    action = found[1]
    argument, _, code = found[2].partition("\n")
    argument = argument.strip()
    if action == "run":
        language = "console" if argument.startswith("$ ") else "python"
        return Block(page, line + 1 if code.strip() else line, language, code or argument)
    if not argument:
        needs = "a reason" if action == "not run" else "the name of a file"
        raise WrongPage(f"{page}:{line}: the marker {action!r} needs {needs}")
    if action == "not run":
        return Block(page, line, action, "", " ".join(found[2].split()))
    return Block(page, line + 1, action, code if code.strip() else "", argument)


def _fence(page: Path, line: int, info: str, code: str, marker: Block | None) -> Block | None:
    language = info.split(maxsplit=1)[0] if info.strip() else ""
    if marker is not None:
        return Block(page, line, marker.action, code, marker.argument)
    if language in (*RUN, *PARSED):
        return Block(page, line, language, code)
    if language in OUTPUT or (language.startswith("{") and language != "{code-block}"):
        return None  # A directive is Sphinx's to run.
    raise WrongPage(
        f"{page}:{line}: nothing here runs a block in {language or 'no language'!r}; "
        "mark it with <!-- not run: the reason -->"
    )
