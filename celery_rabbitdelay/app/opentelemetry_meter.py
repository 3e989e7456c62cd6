"""The same metrics as instruments of OpenTelemetry; imported only where its SDK is set up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from celery_rabbitdelay.app.instruments import INSTRUMENTS, PREFIX, Instrument, Sample

#: The unit of a number of things, as OpenTelemetry writes it.
DIMENSIONLESS: Final = "1"


class OpenTelemetryMeter:
    """Records all metrics with the SDK of this process.

    Args:
        observed: Looks up the metrics that are not recorded as things happen.
    """

    def __init__(self, observed: Callable[[], Iterable[Sample]]) -> None:
        self._observed = observed
        meter = metrics.get_meter(PREFIX)
        self._recording: dict[Instrument, Callable[..., None]] = {}
        for instrument in INSTRUMENTS:
            name, unit = f"{PREFIX}.{instrument.name}", instrument.unit or DIMENSIONLESS
            if instrument.is_observed:
                create: Any = (
                    meter.create_observable_counter
                    if instrument.kind == "counter"
                    else meter.create_observable_gauge
                )
                create(name, [partial(self._observe, instrument)], unit, instrument.help)
            elif instrument.kind == "histogram":
                name = name.removesuffix("_seconds")
                self._recording[instrument] = meter.create_histogram(
                    name,
                    unit,
                    instrument.help,
                    explicit_bucket_boundaries_advisory=instrument.buckets,
                ).record
            else:
                self._recording[instrument] = meter.create_counter(name, unit, instrument.help).add

    def record(self, instrument: Instrument, value: float, labels: tuple[str, ...]) -> None:
        """Add to a counter, or note a value in a histogram."""
        self._recording[instrument](value, _attributes(instrument, labels))

    def _observe(self, instrument: Instrument, _: CallbackOptions) -> Iterator[Observation]:
        for sample in self._observed():
            if sample.instrument is instrument:
                yield Observation(sample.value, _attributes(instrument, sample.labels))


def _attributes(instrument: Instrument, labels: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(instrument.labels, labels, strict=True))
