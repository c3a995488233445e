"""Transport over the network: the servers fetch the trainer's weights before they are paused. No folder is shared."""

from __future__ import annotations

import functools
import logging
import socket
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.servers.addresses import is_local
from mt_grpo.servers.http import RequestFailed, ServerControl
from mt_grpo.vllm_plugin.fetch import time_limit
from mt_grpo.vllm_plugin.guard import FETCH
from mt_grpo.weights.file_offer import FileOffer
from mt_grpo.weights.transport import weight_transport
from mt_grpo.weights.transports.files import SafetensorsTransport
from mt_grpo.weights.updates import WeightSyncError, check_folder, confirm
from mt_grpo.weights.weight_file import file_size

logger = logging.getLogger(__name__)

SLACK = 30.0
"""Seconds that a server has to say that a fetch has failed."""
HERE = "127.0.0.1"


@weight_transport("http")
class HttpTransport(SafetensorsTransport):
    """
    Sends a safetensors file over HTTP. The main process offers its files. Each server fetches one while conversations
    go on, and goes on after a broken connection where it was. Only then it is paused, and loads the file from its own
    machine's memory. Replicas of one machine load the file that the first of them has fetched. Checksums are as of a
    shared file.
    """

    def __init__(
        self,
        client: VLLMServerClient,
        get_model: Callable[[], Any],
        accelerator: Accelerator,
        *,
        port: int | None = None,
        **options: Any,
    ) -> None:
        self._offer: FileOffer | None = None
        super().__init__(client, get_model, accelerator, **options)
        self._shares: dict[tuple[str, str], bool] = {}  # whether one server sees what another has fetched
        found: list[tuple[str, dict[str, str]]] = [("", {})]
        if accelerator.is_main_process:
            try:
                found[0] = "", self._begin_offer(port or 0)
            except WeightSyncError as error:
                found[0] = str(error), {}
        if accelerator.num_processes > 1:
            broadcast_object_list(found)
        fault, self._bases = found[0]
        if fault:
            self.close()
            raise WeightSyncError(fault)

    @staticmethod
    def options(args: Any) -> dict[str, Any]:
        return {"port": args.weight_sync_port, **SafetensorsTransport.options(args)}

    def _begin_offer(self, port: int) -> dict[str, str]:
        """Offers the files; where, for each server."""
        urls = self.client.base_urls
        addresses = {url: _own_address(url) for url in urls}
        alone = all(is_local(urlsplit(url).hostname) for url in urls)
        try:
            self._offer = FileOffer(self._folder, HERE if alone else "", port)
        except OSError as error:
            raise WeightSyncError(
                f"The weights cannot be offered at port {port} ({error.strerror}): set `weight_sync_port` to another "
                "one, or leave it out."
            ) from error
        return {url: self._offer.url(address) for url, address in addresses.items()}

    def _prepare(self, server: ServerControl, config: dict[str, Any]) -> None:
        check_folder(server, config, self._folder, lambda file: self._fetched(server, file))

    def _push(self, server: ServerControl, step: int | None) -> None:
        *first, last = self._ways(server, step)
        for way in first:
            try:
                return self._load(server, way(), step)
            except (RequestFailed, WeightSyncError) as error:  # in doubt, the next one
                logger.warning("The vLLM server at %s gets its weights in another way: %s", server.base_url, error)
        self._load(server, last(), step)

    def _ways(self, server: ServerControl, step: int | None) -> list[Callable[[], Path]]:
        """What brings a server the weights, the cheapest way first and the surest last. Each returns a path there."""
        return self._ways_of(server, self._file(step), label=self.checksum)

    def _ways_of(self, server: ServerControl, file: Path, **more: str) -> list[Callable[[], Path]]:
        neighbour = self._neighbour(server)
        those = [server] if neighbour is None else [neighbour, server]
        return [functools.partial(self._seen, server, one, file, **more) for one in those]

    def _neighbour(self, server: ServerControl) -> ServerControl | None:
        """The first server that is up on the machine of another, and fetches for both; `None` if it is itself."""
        host = _host(server.base_url)
        for one in self.client.servers:
            if one.url == server.base_url:
                return None
            if one.up and _host(one.url) == host and self._shares.get((server.base_url, one.url), True):
                return self._control(one.url)
        return None

    def _seen(self, server: ServerControl, fetching: ServerControl, file: Path, **more: str) -> Path:
        """Has one server fetch a file that another sees; its path. Containers may share an address, and no memory."""
        path, pair = self._fetched(fetching, file, **more), (server.base_url, fetching.base_url)
        if fetching is not server and pair not in self._shares:
            try:
                confirm(server, self.checksum, path)
            except WeightSyncError:
                self._shares[pair] = False
                raise
            self._shares[pair] = True
        return path

    def _fetched(self, server: ServerControl, file: Path, **more: str) -> Path:
        """Has a server fetch a file; its path there. `more` are further arguments of `Fetcher.fetch`."""
        url, size = f"{self._bases[server.base_url]}/{file.name}", self._size(file)
        try:
            path = server.post(
                FETCH,
                {"url": url, "size": size, **more},
                itemgetter("path"),
                final="HTTP 502",  # it has tried several times, and says why it gave up
                timeout=time_limit(size) + SLACK,
            )
        except RequestFailed as error:
            if error.unreachable or error.status is None:
                raise
            raise WeightSyncError(
                f"The vLLM server at {server.base_url} cannot fetch the trainer's weights: {error} Start it with "
                "`mt-grpo serve`, and let it reach the trainer's machine on any port, or on `weight_sync_port`."
            ) from error
        return Path(path)

    def _size(self, file: Path) -> int:
        """Bytes of a file. Other processes, perhaps on other machines, restore servers from that of all weights."""
        if self.accelerator.is_main_process:
            return file.stat().st_size
        assert self._layout is not None  # there was a sync
        return file_size(self._layout)

    def close(self) -> None:
        """Ends the offer too."""
        if self._offer is not None:
            self._offer.close()
        super().close()


def _host(url: str) -> str | None:
    """The machine of a server, as far as its address says."""
    host = urlsplit(url).hostname
    return HERE if is_local(host) else host


def _own_address(url: str) -> str:
    """The address that this machine has in the network of a server. Nothing is sent to find it."""
    parts = urlsplit(url)
    if is_local(parts.hostname):
        return HERE
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((parts.hostname, parts.port or 80))
        except OSError as error:
            raise WeightSyncError(f"There is no way from here to the vLLM server at {url}: {error}.") from error
        address: str = probe.getsockname()[0]
        return address
