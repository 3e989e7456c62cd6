"""Parts of a message."""

from __future__ import annotations

from typing import Any

import pytest

from celery_rabbitdelay.publishing.message import kept_properties


@pytest.mark.parametrize(
    ("received", "kept"),
    [
        ({}, {"priority": None}),
        ({"priority": 0}, {"priority": 0}),
        ({"priority": 9, "reply_to": None}, {"priority": 9}),
        (
            {"correlation_id": "4d5e", "type": "order", "timestamp": 1_900_000_000},
            {
                "priority": None,
                "correlation_id": "4d5e",
                "type": "order",
                "timestamp": 1_900_000_000,
            },
        ),
        (
            {"user_id": "shop", "expiration": "1000", "delivery_mode": 1, "cluster_id": "eu"},
            {"priority": None},
        ),
    ],
    ids=["none", "lowest priority", "empty property", "kept", "never kept"],
)
def test_a_message_published_again_keeps_its_properties(received: Any, kept: Any) -> None:
    assert kept_properties(received) == kept
