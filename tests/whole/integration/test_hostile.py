"""For some seconds, what ``python -m tests.hostile`` does for longer: a client attacks a worker."""

import pytest

from tests.hostile.campaign import attack
from tests.hostile.kinds import BEHIND, KINDS


def test_every_hostile_message_is_accounted_for_and_nobody_else_notices(
    broker_url: str, prefix: str
) -> None:
    account = attack(broker_url, prefix, 600, seed=7)
    assert not account.complaints, str(account)
    assert {*account.kinds.values()} == KINDS.keys()
    assert account.places["undeliverable"] > 100
    assert account.places["allowed"] > 100
    assert account.refused > 0


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_a_worker_of_another_pool_runs_each_task_behind_a_malformed_one(
    broker_url: str, prefix: str, pool: str
) -> None:
    account = attack(broker_url, prefix, 120, 7, pool)
    assert not account.complaints, str(account)
    assert [*account.kinds.values()].count(BEHIND) > 10
