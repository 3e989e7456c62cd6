"""Which versions of RabbitMQ have a quirk."""

import pytest

from celery_rabbitdelay.operations.quirks import Quirk, version_of


@pytest.mark.parametrize(
    ("quirk", "having", "lacking"),
    [
        (Quirk(), ["3.10.8", "5.0.0", ""], []),
        (Quirk(last=(3,)), ["3.10.8", "3.13.7", ""], ["4.0.0"]),
        (Quirk(last=(3, 10)), ["3.9.0", "3.10.25", "3.10.0-rc.1"], ["3.11.0", "4.0.0"]),
        (Quirk(first=(4, 3, 0), last=(4, 3, 2)), ["4.3.0", "4.3.2"], ["4.2.9", "4.3.3"]),
        (Quirk(first=(4, 3)), ["4.3.0", "5.0.0"], ["4.2.9", ""]),
    ],
)
def test_a_quirk_has_its_versions(quirk: Quirk, having: list[str], lacking: list[str]) -> None:
    assert [each for each in having + lacking if quirk.is_in(version_of(each))] == having
