"""Snapshots of every live producer of a provider, at an interval, from a thread of its own."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from qmoe_ep.errors import CaptureError, QMoEError
from qmoe_ep.route_telemetry import give_way, take_snapshots
from qmoe_ep.telemetry_export.prometheus import DEFAULT_EXPERT_SERIES, SnapshotCollector, serve_metrics
from qmoe_ep.telemetry_export.records import RecordWriter
from qmoe_ep.telemetry_export.schema import NamedSnapshot

if TYPE_CHECKING:
    from qmoe_ep.provider import ExecutionProvider

__all__ = ["TelemetryExporter"]

_LOG = logging.getLogger("qmoe_ep")


class TelemetryExporter:
    """Publishes what the layers of a provider route to while they run; a context manager that starts and stops.

    Each round copies the armed records through pinned memory at one point of the provider's stream, and waits for the
    copies asleep and without any lock, so calls and replays go on. While the stream is being captured rounds are left
    out. What goes wrong in a round is logged, and the next one tries again.

    Parameters
    ----------
    provider : whose producers are read, those of executors and those of kernels outside any
    interval : seconds between the starts of two rounds
    path : file of records to append to, see :class:`RecordWriter`; None for none
    max_bytes, keep : when the file is rotated, and how many old ones stay
    port : of a Prometheus endpoint; 0 for any free one (see the attribute), None for none
    host : address of the endpoint; the loopback address, unless others shall see it
    expert_series : most series of one expert each at the endpoint, see :class:`SnapshotCollector`
    callback : called in the exporter's thread with each round's snapshots
    names : names of layers by node, or a function of (executor, node)

    Attributes
    ----------
    port : where the endpoint is, once started
    """

    def __init__(
        self,
        provider: ExecutionProvider,
        *,
        interval: float = 1.0,
        path: str | os.PathLike[str] | None = None,
        max_bytes: int = 64 << 20,
        keep: int = 4,
        port: int | None = None,
        host: str = "127.0.0.1",
        expert_series: int = DEFAULT_EXPERT_SERIES,
        callback: Callable[[list[NamedSnapshot]], object] | None = None,
        names: Mapping[int, str] | Callable[[int | None, int], str] | None = None,
    ) -> None:
        if not interval > 0:
            raise QMoEError(f"interval: expected more than 0 seconds, got {interval!r}")
        if path is None and port is None and callback is None:
            raise QMoEError("path, port, callback: none is given, so nothing would be published; give one")
        if not provider.telemetry.enabled:
            raise QMoEError("provider: it was built with route_telemetry=False; there is nothing to publish")
        self._provider, self._interval = provider, interval
        self._path, self._max_bytes, self._keep = path, max_bytes, keep
        self._host, self._expert_series = host, expert_series
        self.port = port
        self._callback, self._names = callback, names
        self._latest: list[NamedSnapshot] = []
        self._round = threading.Lock()
        self._stopping = threading.Event()
        self._writer: RecordWriter | None = None
        self._stop_serving: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None

    # --- life --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open file and port and begin.

        Raises
        ------
        QMoEError : one of them can't be had, or it runs already; nothing is left open then.
        """
        if self._thread is not None:
            raise QMoEError("the exporter runs already; stop it first")
        writer = None if self._path is None else RecordWriter(self._path, self._max_bytes, self._keep)
        try:
            if self.port is not None:
                collector = SnapshotCollector(lambda: self._latest, self._expert_series)
                self.port, self._stop_serving = serve_metrics(collector, self.port, self._host)
        except BaseException:
            if writer is not None:
                writer.close()
            raise
        self._writer = writer
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="qmoe-ep telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Publish once more, end the thread, and close file and port. Repeating it does nothing."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping.set()
        thread.join()
        if self._stop_serving is not None:
            self._stop_serving()
            self._stop_serving = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> TelemetryExporter:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- rounds ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.wait(self._interval):
            self._publish_safely()
        self._publish_safely()

    def _publish_safely(self) -> None:
        try:
            self.publish()
        except Exception as error:  # a round must not end the thread
            _LOG.warning("route telemetry: a round of the exporter failed: %s", error)

    def publish(self) -> list[NamedSnapshot]:
        """Take and publish one round now, and return its snapshots.

        Raises
        ------
        QMoEError : the file can't be written; or what the callback raises.
        """
        with self._round:
            snapshots = self.take()
            if snapshots:
                self._latest = snapshots
            if self._writer is not None:
                for named in snapshots:
                    self._writer.write([named])
                    give_way()
            if self._callback is not None:
                self._callback(snapshots)
            return snapshots

    def take(self) -> list[NamedSnapshot]:
        """Snapshots of the armed producers at one point of the stream, by executor and node; none during a capture."""
        try:
            taken = take_snapshots(self._provider.telemetry.producers())
        except CaptureError:
            return []
        return [
            NamedSnapshot(snapshot, self._name(producer.executor, producer.node), producer.footprint_bytes)
            for producer, snapshot in taken
        ]

    def _name(self, executor: int | None, node: int) -> str:
        if self._names is None:
            return ""
        return self._names(executor, node) if callable(self._names) else self._names.get(node, "")
