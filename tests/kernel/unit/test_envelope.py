"""Envelopes are read as they were written, and no further than they may be large."""

import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_rabbitdelay.exceptions import InvalidEnvelope
from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.modules import envelope
from celery_rabbitdelay.modules.envelope import Item, OpenedEnvelope, packed

numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
values = st.none() | st.booleans() | numbers | st.text(max_size=8)
tables = st.dictionaries(st.text(max_size=8), values, max_size=3)
items = st.builds(Item, st.binary(max_size=40), tables, tables)


def opened(body: bytes) -> tuple[list[Item], dict[str, Any], dict[str, Any]]:
    read = OpenedEnvelope(body)
    return [*read], read.headers, read.properties


@settings(max_examples=50)
@given(st.lists(items, max_size=5), tables, tables)
def test_what_was_packed_is_unpacked(
    held: list[Item], shared: dict[str, Any], properties: dict[str, Any]
) -> None:
    assert opened(packed(held, shared, properties)) == (held, shared, properties)


def test_what_this_format_has_once_written_is_read() -> None:
    assert ENVELOPE == "application/vnd.rabbitdelay.envelope.1"
    with_dictionary = (
        b"x\xbb\x12x\xd4\xaf\x03\x8a\x9aVcOt\x18\xbeD\x0e&\x90\xfb\xc40\x8dK\x84\xb8\x9c7:\xda"
        b"\x10\xe6t\xb0\xcdL\xd5 a\xc6\n\x00p\x0e\x1f\xe5"
    )
    held = [Item(b"[[1], {}, {}]", {"id": "a"}), Item(b"x")]
    shared: tuple[dict[str, Any], dict[str, Any]] = {"lang": "py"}, {"priority": 0}
    assert opened(with_dictionary) == (held, *shared)
    without = envelope.shared_block(*shared)
    without += b"".join(item.length_prefixed() for item in held)
    assert opened(zlib.compress(without)) == (held, *shared)


def test_what_two_headers_of_a_message_share_is_written_once() -> None:
    shared = envelope.shared_block(
        {"task": "t"}, {"priority": 0}, {"root_id": "id"}, {"correlation_id": "id"}
    )
    items = (Item(b"one", {"id": "1"}), Item(b"two", {"id": "2", "root_id": "1"}), Item(b"none"))
    blocks = shared + b"".join(item.length_prefixed() for item in items)
    one, two, none = OpenedEnvelope(envelope.compressed(blocks))
    assert one == (b"one", {"id": "1", "root_id": "1"}, {"correlation_id": "1"})
    assert (two.headers["root_id"], two.properties) == ("2", {"correlation_id": "2"})
    assert none == (b"none", {}, {})


def compressed(*blocks: bytes) -> bytes:
    return zlib.compress(b"".join(map(envelope.length_prefixed, blocks)))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "stream is incomplete"),
        (packed((Item(b"x"),))[:-3], "stream is incomplete"),
        (b"not zlib", "cannot be decompressed"),
        (zlib.compress(b""), "empty"),
        (zlib.compress(b"\0\0"), "length prefix is truncated"),
        (zlib.compress(b"\0\0\0\x09{}"), "block is truncated"),
        (compressed(b"{}", b"{}"), "message is truncated"),
        (compressed(b"[]"), "not a JSON object"),
        (compressed(b'{"headers":1}'), "not a JSON object"),
        (compressed(b"{a"), "is not JSON"),
        # It ends behind what an envelope holds.
        (zlib.compress(b"\0\0\0\x02{}" + b"\xff" * 4), "4294967295 bytes"),
        # No frame could carry these headers.
        (
            compressed(b'{"headers":{"a":"' + b"x" * 2**20 + b'"}}'),
            r"it has a header of \d+ bytes, more than 1048576",
        ),
        *(
            (
                compressed(b'{"headers":{"a":' + b"[" * depth + b"]" * depth + b"}}"),
                r"more than 32 deep|recursion depth|Stack overflow",
            )
            for depth in (32, 100_000)
        ),
        # The broker would close the connection at them.
        *(
            (compressed(b'{"headers":{"a":[1.5,' + number + b"]}}"), "is not finite")
            for number in (b"NaN", b"-Infinity", b"1e999")
        ),
        # Each could hold a thousand, without end.
        *(
            (packed((Item(b"x", {}, own),), {}, shared), "it contains an envelope")
            for own, shared in (({"content_type": ENVELOPE}, {}), ({}, {"content_type": ENVELOPE}))
        ),
    ],
    ids=range(19),
)
def test_what_is_no_envelope_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(InvalidEnvelope, match=why):
        opened(body)


def test_a_bomb_is_refused_and_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envelope, "MAX_ENVELOPE_BYTES", 2**24)
    message = Item(b"\0" * 2**18).length_prefixed()
    bomb = zlib.compress(envelope.shared_block({}, {}) + message * 70, 9)
    assert len(bomb) < 30_000
    read = 0
    tracemalloc.start()
    with pytest.raises(InvalidEnvelope, match="more than 16777216 bytes"):  # noqa: PT012
        for item in OpenedEnvelope(bomb):
            read += len(item.body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read == 63 * 2**18
    assert peak < 2**21


@pytest.mark.parametrize("around", [envelope._CHUNK, 3 * envelope._CHUNK])
@pytest.mark.parametrize("level", [0, 1])
def test_no_byte_is_missing_wherever_a_chunk_ends(around: int, level: int) -> None:
    shared = envelope.shared_block({}, {})
    for size in range(around - 16, around + 2):
        item = Item(b"x" * size).length_prefixed()
        (opened,) = OpenedEnvelope(zlib.compress(shared + item, level))
        assert len(opened.body) == size


@given(st.lists(st.binary(max_size=8)), st.integers(1, 3))
def test_written_blocks_are_cut_apart_again_and_none_may_be_cut_off(
    blocks: list[bytes], cut: int
) -> None:
    written = b"".join(map(envelope.length_prefixed, blocks))
    assert [bytes(each) for each in envelope.blocks_of(written)] == blocks
    if blocks:
        with pytest.raises(InvalidEnvelope, match="is truncated"):
            list(envelope.blocks_of(written[:-cut]))


def test_an_envelope_holds_as_much_as_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [Item(b"x" * 500), Item(b"")]
    body = packed(held)
    size = len(zlib.decompressobj(zdict=envelope.DICTIONARY).decompress(body))
    for limit, most in (("MAX_ENVELOPE_BYTES", size), ("MAX_ENVELOPE_MESSAGES", 2)):
        with monkeypatch.context() as patch:
            patch.setattr(envelope, limit, most)
            assert (packed(held), [*OpenedEnvelope(body)]) == (body, held)
            patch.setattr(envelope, limit, most - 1)
            with pytest.raises(InvalidEnvelope, match=f"more than {most - 1} "):
                list(OpenedEnvelope(body))
            if limit == "MAX_ENVELOPE_BYTES":
                with pytest.raises(InvalidEnvelope, match=f"{most} .* the maximum of {most - 1}"):
                    packed(held)


def test_what_json_cannot_write_is_refused_where_it_is_packed() -> None:
    for value in (b"bytes", float("nan"), {1, 2}):
        with pytest.raises(InvalidEnvelope, match="cannot be written as JSON"):
            packed((Item(b"", {"x": value}),))
