"""A run's metrics as Prometheus reads them (`metrics_address`), over HTTP from the process that logs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mt_grpo.errors import ConfigError

Numbers = dict[str, float]


class _Gauges:
    """A collector of the library: it is asked at each reading."""

    def __init__(self, look: Callable[[], Numbers], run: str) -> None:
        self._look, self._run = look, run

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        for name, value in sorted(self._look().items()):
            gauge = GaugeMetricFamily(f"mt_grpo_{metric_name(name)}", f"{name} of the run", labels=["run"])
            gauge.add_metric([self._run], value)
            yield gauge


def metric_name(name: str) -> str:
    """The name of a metric as Prometheus allows it: `turn_1/reward` becomes `turn_1_reward`."""
    return re.sub(r"\W", "_", name, flags=re.ASCII)


@contextmanager
def serving(address: int | str, run: str, look: Callable[[], Numbers]) -> Iterator[None]:
    """
    Answers Prometheus within the block, at a port of this machine or `HOST:PORT`, with what `look` says at each
    reading, in another thread, under the label `run`. `ConfigError` if the library is missing or the address is taken.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise ConfigError(
            f"`metrics_address: {address}` needs a package that is not installed: `pip install 'mt-grpo[prometheus]'`."
        ) from None
    host, _, port = str(address).rpartition(":")
    registry = CollectorRegistry()
    registry.register(_Gauges(look, run))
    try:
        server, thread = start_http_server(int(port), host.strip("[]") or "127.0.0.1", registry)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"`metrics_address: {address}` cannot be listened at ({error}): give another port, or none."
        ) from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
