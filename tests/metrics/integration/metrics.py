"""Reading metrics as Prometheus shows them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "celery_rabbitdelay_"

#: Values of one metric by the values of its labels, in the order of their names.
Values = dict[tuple[str, ...], float]


class Scraped:
    """What one scrape has brought.

    Args:
        families: The metrics.
    """

    def __init__(self, families: Iterable[Any]) -> None:
        self._samples = [sample for family in families for sample in family.samples]

    @classmethod
    def of_port(cls, port: int) -> Scraped:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=25) as answer:
            return cls(text_string_to_metric_families(answer.read().decode()))

    def values(self, name: str) -> Values:
        """Return all values of a metric."""
        return {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for sample in self._samples
            if sample.name == PREFIX + name
        }

    def total(self, name: str) -> float:
        """Return the sum of all values of a metric."""
        return sum(self.values(name).values())


def is_served(port: int) -> bool:
    """Return whether anybody answers on a port."""
    try:
        Scraped.of_port(port)
    except URLError:
        return False
    return True
