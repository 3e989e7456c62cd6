# ruff: noqa: T201  # a program at the terminal prints
"""Draws sentences of the project at random, for a reader who has never seen it; counts its words.

``python -m tests.sentences`` prints forty sentences: of the documentation, of docstrings, of log
lines, and of errors. Read them without their surroundings: each should be understood at once.
``python -m tests.sentences --count`` prints how often words occur that a reader stumbles over.
"""

import argparse
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "celery_rabbitdelay"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

#: Words that stand where a noun would say more, or that the field does not use.
WORDS = ["each", "told", "said", "says", "whoever", "what", "those", "nobody", "anybody"]

#: A code span, a link, or the end of a sentence: the first two may contain full stops.
SPAN_OR_END = re.compile(
    r"``.+?``|`[^`]+`|\[(?:`[^`]+`|[^\]`])*\]\([^)]*\)"
    r"|(?P<end>(?<!e\.g)(?<!i\.e)[.!?][*_)\"']*(?:\s+(?=[A-Z0-9`*\"(\[:])|$))"
)

#: How a sentence begins: with a capital, or with a code span, a link, a bold word or a number.
BEGINS = re.compile(r"[A-Z0-9`*\"(\[:]")


def prose(page: Path) -> str:
    """Return the text of a page without code, tables, headings, directives and quotation marks."""
    text = re.sub(r"^(`{3,}).*?^\1", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ *> ?", "", text, flags=re.MULTILINE)
    kept = [line for line in text.splitlines() if not re.match(r"\s*[|#<:]", line)]
    return "\n".join(kept)


def sentences(text: str) -> list[str]:
    """Split paragraphs into sentences of four words at least."""
    starts = r"\n\s*\n|^\s*(?:[-*]|\d+\.) +|^\w+:$|^ {4}\S+: "  # of paragraphs, items, sections
    paragraphs = re.split(starts, text, flags=re.MULTILINE)
    found = [each for one in paragraphs for each in split(" ".join(one.split()))]
    return [each for each in found if BEGINS.match(each) and len(each.split()) > 3]


def split(paragraph: str) -> Iterator[str]:
    """Yield the complete sentences of a paragraph; never split a code span or a link."""
    begin = 0
    for match in SPAN_OR_END.finditer(paragraph):
        if match["end"]:
            yield paragraph[begin : match.end()].rstrip()
            begin = match.end()


def trees() -> Iterator[ast.Module]:
    """Parse all files of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ast.parse(path.read_text())


def docstrings() -> list[str]:
    """Return all docstrings of the package."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    nodes = [node for tree in trees() for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def text_of(node: ast.expr) -> str:
    """Return a literal text; what is inserted into it stands in braces."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            text_of(part) if isinstance(part, ast.Constant) else "{...}" for part in node.values
        )
    return ""


def texts(is_wanted: str) -> list[str]:
    """Return the first text that calls get whose function matches a pattern."""
    found = []
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and re.search(is_wanted, ast.unparse(node.func)):
                given = [text_of(value) for value in node.args]
                found += [text for text in given if len(text.split()) > 3][:1]
    return found


def errors() -> list[str]:
    """Return what errors say: texts of their classes, and what they are raised with."""
    assigned = [
        text_of(node.value)
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and node.value is not None
        and re.search(r"\b(text|reason|why)\b", ast.unparse(node).partition("=")[0])
    ]
    raised = texts(r"(^|\.)(Invalid|Unprocessable|Usage|Unknown|Publish|Not)\w*$")
    return [text for text in (*assigned, *raised) if len(text.split()) > 3]


def sources() -> dict[str, list[str]]:
    """Return all sentences, by where they stand."""
    return {
        "documentation": [each for page in PAGES for each in sentences(prose(page))],
        "docstrings": [each for text in docstrings() for each in sentences(text)],
        "log lines": texts(r"\b(logger|log)\.\w+$"),
        "errors": errors(),
    }


def main() -> None:
    """Draw sentences, or count words."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=40, help="how many sentences")
    parser.add_argument("--seed", type=int, help="draws the same ones again")
    parser.add_argument("--count", action="store_true", help="count words instead")
    options = parser.parse_args()
    if options.count:
        docs = "\n".join(page.read_text() for page in PAGES)
        code = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
        print(f"{len(PAGES)} pages, {len(docs.split()):,} words")
        print(f"{len(docstrings()):,} docstrings")
        print(f"{'word':10}{'pages':>8}{'package':>9}")
        for word in WORDS:
            pages, package = (len(re.findall(rf"(?i)\b{word}\b", text)) for text in (docs, code))
            print(f"{word:10}{pages:8}{package:9}")
        return
    draw = random.Random(options.seed)
    found = sources()
    for where, all_of_it in found.items():
        print(f"\n{where} (of {len(all_of_it):,})\n")
        for sentence in draw.sample(all_of_it, min(options.number // len(found), len(all_of_it))):
            print(f"- {sentence}")


if __name__ == "__main__":
    main()
