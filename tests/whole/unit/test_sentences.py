"""The sampler of sentences takes whole sentences from the documentation and from docstrings."""

from pathlib import Path

from tests.sentences import prose, sentences


def test_a_code_span_is_never_split() -> None:
    text = "Run `celery -A shop. --all` once more. Then call ``a. B! c? D`` in the worker."
    assert sentences(text) == [
        "Run `celery -A shop. --all` once more.",
        "Then call ``a. B! c? D`` in the worker.",
    ]


def test_a_sentence_begins_with_the_whole_code_span() -> None:
    text = "The exchange is a topic exchange. `# shop.py` is its first line."
    assert sentences(text) == [
        "The exchange is a topic exchange.",
        "`# shop.py` is its first line.",
    ]


def test_a_link_keeps_its_brackets_and_is_never_split() -> None:
    text = "[Redis keeps its data](#redis). See [what `a[0]` is. Or was.](page.md#a.b) for more."
    assert sentences(text) == [
        "[Redis keeps its data](#redis).",
        "See [what `a[0]` is. Or was.](page.md#a.b) for more.",
    ]


def test_a_bold_sentence_keeps_its_stars() -> None:
    text = "1. **Two calls may race.** The later call wins.\n2. Its task runs once."
    assert sentences(text) == [
        "**Two calls may race.**",
        "The later call wins.",
        "Its task runs once.",
    ]


def test_a_name_with_a_dot_and_an_abbreviation_do_not_end_a_sentence() -> None:
    text = "Import it from `shop.tasks`, e.g. ``remind``, or from celery.app in Celery 5.4 too."
    assert sentences(text) == [text]


def test_what_is_not_a_whole_sentence_is_left_out() -> None:
    text = "lower case begins this one. It is left out. The list has two items:\n\n- one"
    assert sentences(text) == ["It is left out."]


def test_a_block_quote_loses_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n> Celery ignores the option\n> `delay` without an error.\n")
    assert sentences(prose(page)) == ["Celery ignores the option `delay` without an error."]


def test_a_section_of_a_docstring_begins_a_sentence() -> None:
    text = (
        "Return a job.\n\nArgs:\n    name: The name of the job.\n\nReturns:\n    The state of it."
    )
    assert sentences(text) == ["The name of the job.", "The state of it."]
