"""Envelopes are read as they were written, and no further than they may be large."""

from __future__ import annotations

import json
import tracemalloc
import zlib
from typing import Any

import amqp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_rabbitdelay.exceptions import InvalidEnvelope, UnprocessableMessage
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules import envelope
from celery_rabbitdelay.modules.distribution import Distribution
from celery_rabbitdelay.modules.envelope import Envelope, Item, OpenedEnvelope

distributed = Distribution(Topology()).receive

numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
values = st.none() | st.booleans() | numbers | st.text(max_size=8)
tables = st.dictionaries(st.text(max_size=8), values, max_size=3)
items = st.builds(Item, st.binary(max_size=40), tables, tables)


@given(st.lists(items, max_size=5), tables, tables, st.integers(0, 9))
def test_what_was_packed_is_unpacked(
    held: list[Item], shared: dict[str, Any], properties: dict[str, Any], level: int
) -> None:
    packed = Envelope(tuple(held), shared, properties)
    assert Envelope.unpack(packed.pack(level)) == packed


def test_what_this_format_has_once_written_is_read() -> None:
    with_dictionary = (
        b"x\xbb\x12x\xd4\xaf\x03\x8a\x9aVcOt\x18\xbeD\x0e&\x90\xfb\xc40\x8dK\x84\xb8\x9c7:\xda"
        b"\x10\xe6t\xb0\xcdL\xd5 a\xc6\n\x00p\x0e\x1f\xe5"
    )
    held = Envelope(
        (Item(b"[[1], {}, {}]", {"id": "a"}), Item(b"x")), {"lang": "py"}, {"priority": 0}
    )
    assert Envelope.unpack(with_dictionary) == held
    without = envelope.shared_block(held.headers, held.properties)
    without += b"".join(item.length_prefixed() for item in held.items)
    assert Envelope.unpack(zlib.compress(without)) == held


def test_the_format_says_its_version_and_its_limits() -> None:
    assert ENVELOPE == "application/vnd.rabbitdelay.envelope.1"
    assert (envelope.MAX_ENVELOPE_MESSAGES, envelope.MAX_ENVELOPE_BYTES) == (100_000, 67_108_864)


def test_what_two_headers_of_a_message_share_is_written_once() -> None:
    shared = envelope.shared_block(
        {"task": "t"}, {"priority": 0}, {"root_id": "id"}, {"correlation_id": "id"}
    )
    items = (Item(b"one", {"id": "1"}), Item(b"two", {"id": "2", "root_id": "1"}))
    blocks = shared + b"".join(item.length_prefixed() for item in items)
    held = Envelope.unpack(envelope.compressed(blocks, 9))
    assert (held.headers, held.properties) == ({"task": "t"}, {"priority": 0})
    one, two = held.items
    assert one == (b"one", {"id": "1", "root_id": "1"}, {"correlation_id": "1"})
    assert (two.headers["root_id"], two.properties) == ("2", {"correlation_id": "2"})


def test_what_a_message_lacks_or_no_header_can_be_is_not_copied() -> None:
    told = {"copies": {"headers": {"root_id": "id", "odd": 5}, "properties": {"reply_to": ["id"]}}}
    blocks = (
        envelope.length_prefixed(json.dumps(told).encode())
        + Item(b"x", {"5": "no"}).length_prefixed()
    )
    (held,) = Envelope.unpack(zlib.compress(blocks)).items
    assert held == (b"x", {"5": "no"}, {})


def test_blocks_that_say_nothing_are_an_empty_object() -> None:
    assert envelope.shared_block({}, {}) == b"\0\0\0\x02{}"
    assert Item(b"x").length_prefixed() == b"\0\0\0\x02{}\0\0\0\x01x"


def test_the_dictionary_saves_more_than_half_of_a_small_envelope() -> None:
    properties = {"content_type": "application/json", "content_encoding": "utf-8", "priority": 0}
    embedded = '{"callbacks": null, "errbacks": null, "chain": null, "chord": null}'
    body = f"[[1], {{}}, {embedded}]".encode()
    held = Envelope((Item(body, {"id": "a", "kwargsrepr": "{}"}),), {"lang": "py"}, properties)
    blocks = envelope.shared_block(held.headers, held.properties) + held.items[0].length_prefixed()
    assert 2 * len(held.pack()) < len(zlib.compress(blocks))


def _compressed(blocks: bytes, dictionary: bytes) -> bytes:
    stream = zlib.compressobj(zdict=dictionary)
    return stream.compress(blocks) + stream.flush()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "ends before"),
        (_compressed(b"\0\0\0\x02{}", b"another"), "cannot be decompressed"),
        (b"not zlib", "cannot be decompressed"),
        (zlib.compress(b""), "empty"),
        (zlib.compress(b"\0\0"), "middle of a length"),
        (zlib.compress(b"\0\0\0\x09{}"), "middle of a block"),
        (zlib.compress(b"\0\0\0\x02{}" * 2), "middle of a message"),
        (zlib.compress(b"\0\0\0\x02[]"), "not a JSON object"),
        (zlib.compress(b"\0\0\0\x02{a"), "is not JSON"),
        (zlib.compress(b'\0\0\0\x0d{"headers":1}'), "not a JSON object"),
        (Envelope((Item(b"x"),)).pack()[:-3], "ends before"),
    ],
)
def test_what_is_no_envelope_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(InvalidEnvelope, match=why):
        Envelope.unpack(body)


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    size = envelope.MAX_ENVELOPE_BYTES // 4
    message = b"\0\0\0\x02{}" + envelope.length_prefixed(b"\0" * size)
    bomb = zlib.compress(b"\0\0\0\x02{}" + message * 5, 9)
    assert len(bomb) < 100_000
    with pytest.raises(InvalidEnvelope, match="more than 67108864 bytes"):
        Envelope.unpack(bomb)


def test_an_envelope_is_opened_without_holding_more_than_a_message_of_it() -> None:
    """A bomb of 60 KiB, which holds 60 MiB."""
    message = Item(b"\0" * 2**20).length_prefixed()
    bomb = envelope.compressed(envelope.shared_block({}, {}) + message * 60, 9)
    assert len(bomb) < 100_000
    tracemalloc.start()
    assert sum(len(item.body) for item in OpenedEnvelope(bomb)) == 60 * 2**20
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20


def test_a_message_in_it_may_be_as_large_as_one_outside() -> None:
    body = Envelope((Item(b"12345"),)).pack()
    assert [item.body for item in OpenedEnvelope(body, 5)] == [b"12345"]
    with pytest.raises(InvalidEnvelope, match="a message of 5 bytes is in it, more than 4"):
        list(OpenedEnvelope(body, 4))


@pytest.mark.parametrize("around", [envelope._CHUNK, 3 * envelope._CHUNK])
@pytest.mark.parametrize("level", [0, 1, 9])
def test_no_byte_is_missing_wherever_a_chunk_ends(around: int, level: int) -> None:
    shared = envelope.shared_block({}, {})
    for size in range(around - 60, around + 20):
        item = Item(b"x" * size).length_prefixed()
        (opened,) = OpenedEnvelope(envelope.compressed(shared + item, level))
        assert len(opened.body) == size


@given(st.lists(st.binary(max_size=8)), st.integers(1, 3))
def test_written_blocks_are_cut_apart_again_and_none_may_be_cut_off(
    blocks: list[bytes], cut: int
) -> None:
    written = b"".join(map(envelope.length_prefixed, blocks))
    assert [bytes(each) for each in envelope.blocks_of(written)] == blocks
    if blocks:
        with pytest.raises(InvalidEnvelope, match="in the middle of a"):
            list(envelope.blocks_of(written[:-cut]))


def test_a_block_that_claims_more_than_an_envelope_holds_is_refused_at_once() -> None:
    with pytest.raises(InvalidEnvelope, match="claims 4294967295 bytes"):
        Envelope.unpack(zlib.compress(b"\0\0\0\x02{}" + b"\xff" * 4))


def test_headers_that_no_frame_could_carry_are_not_read() -> None:
    large = json.dumps({"headers": {"a": "x" * 2**20}}).encode()
    with pytest.raises(InvalidEnvelope, match=r"a header of \d+ bytes is in it, more than 1048576"):
        Envelope.unpack(zlib.compress(envelope.length_prefixed(large)))


@pytest.mark.parametrize("depth", [31, 32, 2_000, 100_000])
def test_headers_nested_too_deep_are_refused(depth: int) -> None:
    block = b'{"headers":{"a":' + b"[" * depth + b"]" * depth + b"}}"
    body = zlib.compress(envelope.length_prefixed(block))
    if depth == 31:  # in the table of headers, that is the 32nd
        assert Envelope.unpack(body).items == ()
        return
    with pytest.raises(InvalidEnvelope, match=r"more than 32 tables|recursion depth"):
        Envelope.unpack(body)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999"])
def test_a_number_at_which_the_broker_would_close_the_connection_is_refused(number: bytes) -> None:
    block = b'{"headers":{"a":[1.5,' + number + b"]}}"
    with pytest.raises(InvalidEnvelope, match="is not finite"):
        Envelope.unpack(zlib.compress(envelope.length_prefixed(block)))


@pytest.mark.parametrize("is_shared", [True, False])
def test_an_envelope_in_an_envelope_is_refused(is_shared: bool) -> None:
    """Each could hold a thousand, without end."""
    inner = {"content_type": ENVELOPE}
    body = Envelope(
        (Item(b"x", {}, {} if is_shared else inner),), {}, inner if is_shared else {}
    ).pack()
    with pytest.raises(InvalidEnvelope, match="there is an envelope in it"):
        Envelope.unpack(body)


def test_properties_that_amqp_lacks_are_left_out() -> None:
    item = Item(b"x", {}, {"body": "y", "priority": 1, "application_headers": {}, "channel": 0})
    assert item.properties_with({"priority": 0, "type": "t", "self": 1}) == {
        "priority": 1,
        "type": "t",
    }


def test_too_many_messages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    body = Envelope(tuple(Item(b"") for _ in range(6))).pack()
    monkeypatch.setattr(envelope, "MAX_ENVELOPE_MESSAGES", 5)
    as_many = Envelope(tuple(Item(b"") for _ in range(5)))
    assert Envelope.unpack(as_many.pack()) == as_many
    with pytest.raises(InvalidEnvelope, match="more than 5 messages"):
        Envelope.unpack(body)
    with pytest.raises(InvalidEnvelope, match="6 messages are more than 5"):
        Envelope(tuple(Item(b"") for _ in range(6))).pack()


def test_an_envelope_may_hold_as_many_bytes_as_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Envelope((Item(b"x" * 500),))
    body = held.pack()
    size = len(zlib.decompressobj(zdict=envelope.DICTIONARY).decompress(body))
    monkeypatch.setattr(envelope, "MAX_ENVELOPE_BYTES", size)
    assert (held.pack(), Envelope.unpack(body)) == (body, held)
    monkeypatch.setattr(envelope, "MAX_ENVELOPE_BYTES", size - 1)
    with pytest.raises(InvalidEnvelope, match=f"{size} bytes are more than {size - 1}"):
        held.pack()
    with pytest.raises(InvalidEnvelope, match=f"more than {size - 1} bytes"):
        Envelope.unpack(body)


def test_what_json_cannot_write_is_refused_where_it_is_packed() -> None:
    for value in (b"bytes", float("nan"), {1, 2}):
        with pytest.raises(InvalidEnvelope, match="cannot be written as JSON"):
            Envelope((Item(b"", {"x": value}),)).pack()


def test_distribution_gives_each_message_its_own_and_what_all_share() -> None:
    held = Envelope(
        (Item(b"one", {"id": "1"}), Item(b"two", {"id": "2"}, {"priority": 2})),
        {"task": "t", headers.EXCHANGE: "office", headers.ROUTING_KEY: "paper"},
        {"content_type": "application/json", "priority": 0},
    )
    told = {headers.DUE: 5}
    message = amqp.Message(held.pack(), content_type=ENVELOPE, application_headers=told)
    first, second = distributed(message)
    assert (first.exchange, first.routing_key) == ("office", "paper")
    assert first.message.headers.to_headers() == {"task": "t", "id": "1", headers.DUE: 5}
    assert first.message.amqp().properties["content_type"] == "application/json"
    assert [each.message.amqp().properties["priority"] for each in (first, second)] == [0, 2]


def test_distribution_refuses_what_it_cannot_open() -> None:
    with pytest.raises(UnprocessableMessage, match="envelope cannot be opened"):
        list(distributed(amqp.Message(b"x", content_type=ENVELOPE)))
