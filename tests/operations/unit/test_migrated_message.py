"""A message that is migrated stays what it is, and is signed as its sender has vouched."""

import amqp
import pytest
from hypothesis import given, settings

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.conversion import Migration
from celery_rabbitdelay.publishing.message import WaitingMessage
from celery_rabbitdelay.publishing.signature import SigningKeys
from tests.kernel.unit.test_signature import KEY, OTHER, delayed
from tests.kernel.unit.test_waiting_message import (
    OLD,
    TOPOLOGY,
    assert_it_stays_what_it_is,
    received,
)
from tests.kernel.unit.waiting import verifies


@settings(max_examples=40)
@given(message=received())
def test_a_migrated_message_stays_what_it_is(message: amqp.Message) -> None:
    assert_it_stays_what_it_is(migrated, message)


def migrated(message: amqp.Message) -> WaitingMessage:
    key = OLD.route(60, "letters").routing_key
    message.delivery_info = {"exchange": "", "routing_key": key}
    moved = Migration(OLD, TOPOLOGY, lambda name: None).convert(message, "old.minutes.1")
    return moved.message


@pytest.mark.parametrize("vouches", [False, True])
@pytest.mark.parametrize("sign", [False, True])
def test_a_migration_signs_more_only_where_it_is_told_to(sign: bool, vouches: bool) -> None:
    source = Topology("old", queue_type="classic")
    signing_with_new = SigningKeys([OTHER, KEY])
    migration = Migration(source, TOPOLOGY, lambda name: None, signing_with_new, vouches)
    message = delayed(sign=sign)
    message.properties["priority"] = 9
    message.delivery_info = {"routing_key": source.route(60, "").routing_key}
    moved = migration.convert(message, "old.minutes.1").message
    # It has another header now, for its priority.
    assert (moved.headers.priority, verifies(SigningKeys(OTHER), moved)) == (9, (sign or vouches))
