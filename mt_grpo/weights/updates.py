"""The HTTP calls of a weight update. They leave the server running, whatever fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from mt_grpo.errors import WeightSyncError
from mt_grpo.servers.http import RequestFailed, ServerControl
from mt_grpo.servers.owner import weight_version

_ACTIVE, _INACTIVE = "already active", "without a matching start"
"""What vLLM says of an update that has begun, and of one that has not."""
_VERDICT = "checksum"
"""A word in the error of a worker that has other weights; asking again does not help."""


@dataclass(frozen=True)
class Update:
    """A server that gets weights, its weight version afterwards, and whether it keeps features of media."""

    server: ServerControl
    label: str
    media: bool

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """
        The pause in which a server gets weights. Requests under way continue afterwards. The prefix cache, of other
        weights, is emptied, and so is what the vision tower made of images. A sleep of level 0 is vLLM's `/pause`
        without the 20 ms that this waits afterwards.
        """
        server = self.server
        try:
            server.post("/sleep", level="0", mode="keep")
            yield
            if not server.post("/reset_prefix_cache", read=itemgetter("success"), reset_running_requests="true"):
                raise WeightSyncError(f"The vLLM server at {server.base_url} could not empty its prefix cache.")
            if self.media:  # after it, which takes every request under way out of the batch that holds some of it
                server.post("/reset_encoder_cache")
        except BaseException:  # Ctrl-C as well: a server that stays paused answers nobody
            server.tidy_up("/wake_up", tags="scheduling")
            raise
        server.post("/wake_up", tags="scheduling")

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """
        An update in such a pause, through vLLM's weight-transfer engine. It is always ended, and only a successful one
        sets the server's weight version.
        """
        with self.paused():
            try:
                self.server.post("/start_weight_update", {}, final=_ACTIVE)
            except RequestFailed as error:
                if _ACTIVE not in str(error):
                    raise
                # left behind by a trainer that was killed, or begun by a call whose answer was lost
                _end_update(self.server)
                self.server.post("/start_weight_update", {})
            try:
                yield
            except BaseException:
                self.server.tidy_up("/finish_weight_update", {})
                raise
            _end_update(self.server, self.label)

    def load(self, path: Path, checksum: str) -> None:
        """Makes the server load a file of weights, and each of its workers confirm what its model received."""
        with self.begun():
            self.server.post("/update_weights", {"update_info": {"path": str(path)}}, final=_VERDICT)
            confirm(self.server, checksum)


def _end_update(server: ServerControl, version: str | None = None) -> None:
    """Ends an update. With a version, the server then has it."""
    try:
        server.post("/finish_weight_update", {} if version is None else {"weight_version": version}, final=_INACTIVE)
    except RequestFailed as error:  # ended by a call whose answer was lost
        if _INACTIVE not in str(error) or (version is not None and weight_version(server) != version):
            raise


def fall_asleep(server: ServerControl, level: int) -> None:
    """
    Frees the memory of a server on the trainer's GPUs. Requests are paused first: one that was being computed would
    read memory that is gone (vLLM issue 28714).
    """
    server.post("/sleep", level="0", mode="keep")
    server.post("/sleep", level=str(level), mode="abort")


def wake_weights(server: ServerControl) -> None:
    """Gives the weights of a sleeping server their memory. Of level 2 their contents are gone. It stays paused."""
    server.post("/wake_up", tags="weights")


def wake_cache(server: ServerControl) -> None:
    """Gives the cache its memory, and ends the pause."""
    server.post("/wake_up", tags="kv_cache")


def confirm(server: ServerControl, checksum: str, path: Path | None = None) -> None:
    """
    Asks every worker of a server whether the file at `path`, or the weights that it loaded last, have a checksum.
    """
    info = {"checksum": checksum} if path is None else {"checksum": checksum, "path": str(path)}
    try:
        server.post("/init_weight_transfer_engine", {"init_info": info}, final=_VERDICT)
    except RequestFailed as error:
        if error.status is None or error.status < 500:
            raise
        raise WeightSyncError(
            f"The weights did not arrive at the vLLM server at {server.base_url} as they were sent: {error}"
        ) from error
