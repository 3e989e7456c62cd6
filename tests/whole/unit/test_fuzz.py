"""For some seconds, what ``python -m tests.fuzz`` does for longer; and what that has found once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import SEEDS, TARGETS

FOUND: Final = Path(__file__).parents[2] / "fuzz" / "found"


def _inputs() -> Iterator[bytes]:
    yield from SEEDS
    for path in sorted(FOUND.glob("*")):
        yield path.read_bytes()


@pytest.mark.parametrize("name", TARGETS)
def test_what_the_fuzzer_begins_with_and_what_it_has_found_breaks_nothing(name: str) -> None:
    for each in _inputs():
        TARGETS[name](each)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A seed with some bytes replaced, removed or put in."""
    given = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(given)))
        given[at : at + draw(st.integers(0, 4))] = draw(st.binary(max_size=6))
    return bytes(given)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=100)
@given(given=mutated())
@example(given=b"")
def test_nothing_but_a_refusal_comes_of_what_anybody_writes(name: str, given: bytes) -> None:
    TARGETS[name](given)
