"""The words of a routing key."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from celery_rabbitdelay.levels.routing_key import (
    DISTRIBUTION,
    RoutingKeys,
    decode_destination,
    encode_destination,
)
from tests.unit.strategies import destinations


@given(destinations, destinations)
def test_a_destination_is_one_word_and_different_for_different_queues(one: str, two: str) -> None:
    word = encode_destination(one)
    assert not set(".*#") & set(word)
    assert len(word.encode()) <= 120
    assert (word == encode_destination(two)) == (one == two)
    decoded = decode_destination(word)
    assert decoded == one or (decoded is None and word.startswith("%~"))


@given(st.text(min_size=121, max_size=255))
def test_a_long_name_is_hashed(name: str) -> None:
    word = encode_destination(name)
    assert word.startswith("%~")
    assert decode_destination(word) is None


def test_any_text_says_a_shard() -> None:
    keys = RoutingKeys(levels=2, shards=4)
    assert keys.shard("half a character \ud800") in range(4)
    assert keys.shard("é") == zlib.crc32("é".encode()) % 4


def test_no_queue_shares_the_word_of_distribution() -> None:
    word = encode_destination(DISTRIBUTION)
    assert word == "%distribution"
    assert encode_destination(word) == "%25distribution"
    assert decode_destination("%25distribution") == word
