"""The words of a routing key."""

import hashlib
import zlib

import pytest
from hypothesis import given

from celery_rabbitdelay.levels import routing_key
from tests.kernel.unit.strategies import destinations


@given(destinations, destinations)
def test_a_destination_is_one_word_and_different_for_different_queues(one: str, two: str) -> None:
    word = routing_key.encode_destination(one)
    assert not set(".*#") & set(word)
    assert len(word.encode()) <= 120
    assert (word == routing_key.encode_destination(two)) == (one == two)
    decoded = routing_key.decode_destination(word)
    assert decoded == one or (decoded is None and word.startswith("%~"))


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("celery", "celery"),
        ("daily.reports", "daily%2Ereports"),
        ("a*b#c%d", "a%2Ab%23c%25d"),
        ("é", "é"),
    ],
)
def test_a_destination_is_encoded_as_in_bindings_on_brokers_already(name: str, word: str) -> None:
    assert routing_key.encode_destination(name) == word
    assert routing_key.decode_destination(word) == name


@pytest.mark.parametrize("name", ["n" * 120, "é" * 60, "." * 40])
def test_a_word_of_120_bytes_is_the_longest_that_is_not_hashed(name: str) -> None:
    assert routing_key.decode_destination(routing_key.encode_destination(name)) == name
    longer = f"{name}n"
    digest = hashlib.sha256(longer.encode()).hexdigest()
    assert routing_key.encode_destination(longer) == f"%~{digest}"


def test_with_several_shards_the_shard_s_word_comes_first() -> None:
    keys = routing_key.RoutingKeys(levels=2, shards=2)
    assert (keys.key(1, (4, 2), "q"), keys.pattern(1, 1, 2)) == ("s1.4.2.q", "s1.*.2.#")
    assert (keys.destination_pattern("q"), keys.digits("s1.4.2.q")) == ("*.*.*.q", ("4", "2"))
    assert [keys.shard_words(shard) for shard in range(2)] == [("s0",), ("s1",)]


def test_the_shard_is_that_of_the_task_whatever_its_id() -> None:
    two, one = routing_key.RoutingKeys(1, shards=2), routing_key.RoutingKeys(1)
    ids = [f"task-{number}" for number in range(50)]
    assert {two.shard(each) for each in ids} == {0, 1}
    assert {one.shard(each) for each in ids} == {0}
    assert two.shard("é") == zlib.crc32("é".encode()) % 2
    assert two.shard("half a character \ud800") in (0, 1)


def test_no_queue_shares_the_word_of_distribution() -> None:
    word = routing_key.encode_destination(routing_key.DISTRIBUTION)
    assert (word, routing_key.encode_destination(word)) == ("%distribution", "%25distribution")
