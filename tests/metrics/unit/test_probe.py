"""Which probes a round has, how late they are, and when one counts as missing; without a broker."""

import random
from typing import Any
from unittest import mock

import pytest
from kombu import Connection

from celery_rabbitdelay.levels.layout import Layout, custom
from celery_rabbitdelay.levels.topology import PROBE_TYPE, Topology
from celery_rabbitdelay.metrics import probe
from celery_rabbitdelay.metrics.probe import ROUTE, TOKEN_TYPE, ProbeService
from tests.kernel.unit.clock import Clock
from tests.kernel.unit.test_app import NOWHERE

#: Through the first level, a probe needs an expiration.
LAYOUT = custom([("long", 3, 70), ("fives", 14, 5), ("seconds", 5, 1)])


class Probing:
    """A service of probes with a mock for its channel, and a fake clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layout: Layout = LAYOUT) -> None:
        self.channel, self.clock, self.waiting = mock.Mock(), Clock(), dict[str, int]()
        monkeypatch.setattr(probe, "time", self.clock)
        monkeypatch.setattr(random, "choice", lambda empty: empty[0])
        monkeypatch.setattr(
            probe,
            "find_queues",
            lambda _, names: [(self.waiting.get(each, 0), 0) for each in names],
        )
        topology = Topology("p", layout)
        self.service = ProbeService(Connection(NOWHERE), mock.Mock(), mock.Mock(), topology)

    def send_round(self) -> list[tuple[str, str, Any]]:
        """Return where the probes of a round go, and their expiration."""
        self.service._send_round(self.channel, mock.Mock())
        calls = [each.args for each in self.channel.basic_publish.mock_calls]
        assert calls[0][0].properties["type"] == TOKEN_TYPE
        return [(where, key, sent.properties.get("expiration")) for sent, where, key in calls[1:]]

    def receive(self, kind: str, probe_id: str | None = None) -> mock.Mock:
        message = mock.Mock(properties={"type": kind, "message_id": probe_id})
        self.service._received(message)
        return message


def test_a_round_probes_the_route_and_each_level(monkeypatch: pytest.MonkeyPatch) -> None:
    probing = Probing(monkeypatch)
    # Behind this message, a probe would wait for as long as it does.
    probing.waiting["p.long.1"] = 1
    assert probing.send_round() == [
        ("p.long.x1", "0.0.1.%probe", None),
        ("p.long.x1", "2.0.0.%probe", "1000"),
        ("p.fives.x1", "0.1.0.%probe", None),
        ("p.seconds.x1", "0.0.1.%probe", None),
    ]
    levels = (ROUTE, "long.x1", "fives.x1", "seconds.x1")
    missing = dict.fromkeys(levels, 0)
    assert probing.service.status() == {"prefix": "p", "late": {}, "missing": missing}
    short = Probing(monkeypatch, custom([("tenths", 10, 0.1), ("hundredths", 10, 0.01)]))
    assert short.send_round()[0][1] == "1.0.%probe"


def test_a_probe_is_as_late_as_it_arrives_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    probing = Probing(monkeypatch)
    probing.send_round()
    probing.clock.now = 1.5
    for probe_id in ["another worker's", *probing.service._sent]:
        probing.receive(PROBE_TYPE, probe_id)
    assert probing.service.late == {
        **dict.fromkeys((ROUTE, "long.x1", "seconds.x1"), 0.5),
        "fives.x1": -3.5,
    }


@pytest.mark.parametrize("waiting", [1, 2])
def test_a_probe_is_missing_a_minute_after_its_time_unless_another_message_is_in_front(
    monkeypatch: pytest.MonkeyPatch, waiting: int
) -> None:
    probing = Probing(monkeypatch)
    probing.waiting["p.long.1"] = 1
    probing.send_round()
    probing.waiting["p.long.2"] = waiting
    for now in (60.9, 61.0, 62.0):
        probing.clock.now = now
        probing.service._find_missing(mock.Mock())
    missing = {ROUTE, "seconds.x1", *["long.x1"] * (waiting == 1)}
    assert probing.service.late == dict.fromkeys(missing, 60.0)
    assert {level for level, count in probing.service.missing.items() if count == 1} == missing


def test_the_token_is_held_until_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    probing = Probing(monkeypatch)
    first, sent, second = map(probing.receive, (TOKEN_TYPE, PROBE_TYPE, TOKEN_TYPE))
    acknowledged = [each.channel.basic_ack.called for each in (first, sent, second)]
    assert acknowledged == [True, True, False]


def test_the_active_worker_sends_a_round_at_once_and_each_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probing, rounds, connection = Probing(monkeypatch), list[int](), mock.MagicMock()
    connection.channel.return_value = probing.channel
    instants = iter([0, 59.9, 60])

    def wait_for_a_frame(timeout: float) -> None:
        rounds.append(probing.service.rounds)
        if len(rounds) == 4:
            probing.service.stopping.set()
            raise TimeoutError
        probing.clock.now = next(instants)
        if len(rounds) > 1:
            raise TimeoutError
        probing.receive(TOKEN_TYPE)

    connection.drain_events = wait_for_a_frame
    assert probing.service._serve_on(connection)
    assert rounds == [0, 1, 1, 2]
    # Another worker may be the active one until the broker says otherwise.
    assert not probing.service._is_active
    probing.channel.basic_qos.assert_called_once_with(0, 100, False)
