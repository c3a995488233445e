"""Transport of what changed: between two steps most weights in bfloat16 keep all their bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mt_grpo.servers.http import ServerControl
from mt_grpo.vllm_plugin.delta import difference
from mt_grpo.weights.transport import weight_transport
from mt_grpo.weights.transports.http import HttpTransport

WHOLE_EVERY = 50
"""One sync in so many sends all weights."""


@weight_transport("delta")
class DeltaTransport(HttpTransport):
    """
    Sends the words of the file that changed, as `http` sends the file. A server puts them into a copy of the file that
    it fetched before, and loads the whole. So nothing is lost, and the checksum is of all weights. All weights are
    sent where a server holds another file, where a checksum does not fit, once in `WHOLE_EVERY` syncs, and where half
    a file or more would be sent anyway.
    """

    _base: str | None = None
    """Checksum of the weights that the latest change starts from; `None` if all weights are to be sent."""

    def _gather(self, step: int | None) -> None:
        before, self._base = self.checksum, None
        super()._gather(step)
        if not self.accelerator.is_main_process:
            return
        for old in self._folder.glob("change-*"):
            old.unlink()
        if step is None or self.num_syncs % WHOLE_EVERY == 0 or len(self._files) < 2:
            return
        older, newer = self._files
        change = difference(older.content, newer.content)
        if change is not None:
            self._change_file(step).write_bytes(change.numpy().tobytes())
            self._base = before

    def _ways(self, server: ServerControl, step: int | None) -> list[Callable[[], Path]]:
        """Of the change first; in doubt, of all weights."""
        whole = super()._ways(server, step)
        if self._base is None or step is None:
            return whole
        return [*self._ways_of(server, self._change_file(step), label=self.checksum, base=self._base), *whole]

    def _change_file(self, step: int) -> Path:
        return self._folder / f"change-{step:08d}"
