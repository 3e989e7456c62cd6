"""For some seconds, what ``python -m tests.hostile`` does for longer: a client attacks a worker."""

from __future__ import annotations

from tests.hostile.campaign import attack
from tests.hostile.kinds import KINDS


def test_every_hostile_message_is_accounted_for_and_nobody_else_notices(
    broker_url: str, prefix: str
) -> None:
    account = attack(broker_url, prefix, 2_000, seed=7)
    assert account.is_good, str(account)
    assert account.kinds.keys() == KINDS.keys()
    assert account.places["undeliverable"] > 500
    assert account.places["allowed"] > 500
    assert account.refused > 0
