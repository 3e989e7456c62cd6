"""The setting of the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from celery_rabbitdelay.app.settings import SettingsGroup, SettingType

#: The highest TCP port.
MAX_PORT: Final = 65_535


def _is_port(value: object) -> bool:
    host, colon, port = str(value).rpartition(":")
    is_whole = type(value) in (int, str) and port.isdecimal() and len(port) <= len(str(MAX_PORT))
    return is_whole and bool(host) == bool(colon) and 0 < int(port) <= MAX_PORT


_METRICS_PORT: Final = SettingType(
    f"a port from 1 to {MAX_PORT}, perhaps with the address of an interface: 0.0.0.0:9808", _is_port
)


@dataclass(frozen=True, repr=False)
class MetricsSettings(SettingsGroup):
    """The setting of the metrics."""

    #: The TCP port on which a worker serves its metrics to Prometheus, on 127.0.0.1 unless an
    #: address precedes the port, as in "0.0.0.0:9808". None to serve no metrics.
    metrics_port: Annotated[int | str | None, _METRICS_PORT] = None
