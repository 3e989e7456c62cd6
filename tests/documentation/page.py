"""The code blocks of a Markdown page, and what a reader does with each. Pure."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.token import Token

#: Languages whose blocks are run.
RUN: Final = ("python", "pycon", "console")

#: Languages whose blocks are read by a parser.
PARSED: Final = ("json", "toml", "yaml")

#: What a program prints, and drawings made of characters.
OUTPUT: Final = ("text",)

#: A comment above a block that is not run here. No comment may hold code.
_MARKER: Final = re.compile(r"<!--\s*(not run|from):(.*)-->\s*", re.DOTALL)

#: The first line of a block that a reader saves as a file, or adds to the end of that file.
_FILE: Final = re.compile(r"# ([\w./-]+\.\w+)(, continued)?\n")


class WrongPage(Exception):
    """A block is neither run nor marked, or its marker is wrong; the message says where."""


@dataclass(frozen=True)
class Block:
    """Something that a reader does at its place in a page.

    Attributes:
        page: The file.
        line: The number of its first line, from 1.
        action: ``python``, ``pycon`` and ``console``: run it; ``json``, ``toml`` and ``yaml``:
            parse it; ``file``: save it; ``continued``: add it to the file; ``from``: find it in a
            source of this repository, which other tests run; ``not run``: nothing.
        code: Its text.
        argument: The name of the file, the source, or the reason why it is not run.
        section: The address of the heading that it stands under.
    """

    page: Path
    line: int
    action: str
    code: str
    argument: str = ""
    section: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Return what a reader does, in the order of the page.

    A link whose text is a file's name, such as ``[`shop.py`](other.md#section)``, makes a reader
    save that file from the other page.

    Raises:
        WrongPage: A block has no known language, or a marker no reason or no block.
    """
    return list(_blocks(page, with_links=True))


def _blocks(page: Path, with_links: bool) -> Iterator[Block]:
    marker: Block | None = None
    section = ""
    tokens = MarkdownIt("commonmark").parse(page.read_text())
    for before, token in pairwise([None, *tokens]):
        assert token is not None
        if token.type == "inline":
            if before is not None and before.type == "heading_open":
                section = _address(token.content)
            if with_links:
                yield from _linked_files(page, token)
        if token.type == "html_block" and "<!--" in token.content:
            _refuse_lonely(marker)
            marker = _marker(page, token)
        elif token.type == "fence":
            block = _fence(page, token, marker, section)
            marker = None
            if block is not None:
                yield block
        elif token.type == "code_block":
            raise WrongPage(f"{page}:{_line(token)}: fence the block and name its language")
        else:
            _refuse_lonely(marker)
            marker = None
    _refuse_lonely(marker)


def _line(token: Token) -> int:
    assert token.map is not None
    return token.map[0] + 1


def _address(heading: str) -> str:
    """Return the address of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-")


def _refuse_lonely(marker: Block | None) -> None:
    if marker is not None:
        raise WrongPage(f"{marker}: the marker stands right above no code block")


def _linked_files(page: Path, token: Token) -> Iterator[Block]:
    """Yield the files that a paragraph takes from other pages."""
    children = token.children or []
    for link, text in pairwise(children):
        target, _, section = str(link.attrGet("href") or "").partition("#")
        is_file = text.type == "code_inline" and _FILE.fullmatch(f"# {text.content}\n")
        if not (is_file and section and target.endswith(".md")):
            continue
        for block in _blocks(page.parent / target, with_links=False):
            if (block.action, block.argument, block.section) == ("file", text.content, section):
                yield block


def _marker(page: Path, token: Token) -> Block:
    """Return what a comment says of the block below."""
    found = _MARKER.fullmatch(token.content)
    if not found:
        raise WrongPage(f"{page}:{_line(token)}: a comment hides something from readers")
    action, argument = found[1], " ".join(found[2].split())
    if not argument:
        needs = "a reason" if action == "not run" else "the name of a file"
        raise WrongPage(f"{page}:{_line(token)}: the marker {action!r} needs {needs}")
    return Block(page, _line(token), action, "", argument)


def _fence(page: Path, token: Token, marker: Block | None, section: str) -> Block | None:
    line, code = _line(token) + 1, token.content
    language = token.info.split(maxsplit=1)[0] if token.info.strip() else ""
    if marker is not None:
        return Block(page, line, marker.action, code, marker.argument, section)
    if file := _FILE.match(code):
        action = "continued" if file[2] else "file"
        return Block(page, line, action, code, file[1], section)
    if language in (*RUN, *PARSED):
        return Block(page, line, language, code, section=section)
    if language in OUTPUT or (language.startswith("{") and language != "{code-block}"):
        return None  # A directive is Sphinx's to run.
    raise WrongPage(
        f"{page}:{line}: nothing here runs a block in {language or 'no language'!r}; "
        "mark it with <!-- not run: the reason -->"
    )
