"""Transport over the network: the servers fetch the trainer's weights before they are paused. No folder is shared."""

from __future__ import annotations

import re
import secrets
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.rollout.engines.vllm.http import RequestFailed, ServerControl
from mt_grpo.vllm_plugin.guard import FETCH
from mt_grpo.weights.transport import weight_transport
from mt_grpo.weights.transports.files import SafetensorsTransport
from mt_grpo.weights.updates import WeightSyncError, check_folder, push_file

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@weight_transport("http")
class HttpTransport(SafetensorsTransport):
    """
    Sends a safetensors file over HTTP. The main process offers its files. Each server fetches one while conversations
    go on, and goes on after a broken connection where it was. Only then it is paused, and loads the file from its own
    machine's memory. Checksums are as of a shared file.
    """

    def __init__(
        self, client: VLLMServerClient, get_model: Callable[[], Any], accelerator: Accelerator, **options: Any
    ) -> None:
        super().__init__(client, get_model, accelerator, **options)
        self._offer: FileOffer | None = None
        bases = [dict[str, str]()]
        if accelerator.is_main_process:
            alone = all(urlsplit(url).hostname in LOOPBACK for url in client.base_urls)
            self._offer = FileOffer(self._folder, "127.0.0.1" if alone else "")
            bases[0] = {url: self._offer.url(_own_address(url)) for url in client.base_urls}
        if accelerator.num_processes > 1:
            broadcast_object_list(bases)
        self._bases = bases[0]

    def _prepare(self, server: ServerControl, config: dict[str, Any]) -> None:
        check_folder(server, config, self._folder, lambda file: self._brought(server, file))

    def _push(self, server: ServerControl, step: int | None) -> None:
        path = self._brought(server, self._file(step), label=self.checksum)
        push_file(server, path, self._label(step), self.checksum)

    def _brought(self, server: ServerControl, file: Path, **more: str) -> Path:
        """Has a server fetch a file; its path there. `more` are further arguments of `Fetcher.fetch`."""
        url = f"{self._bases[server.base_url]}/{file.name}"
        try:
            return Path(server.post(FETCH, {"url": url, "size": file.stat().st_size, **more})["path"])
        except RequestFailed as error:
            if error.unreachable or error.status is None:
                raise
            raise WeightSyncError(
                f"The vLLM server at {server.base_url} cannot fetch the trainer's weights: {error} Start it with "
                "`mt-grpo serve`, and let it reach the trainer's machine on any port."
            ) from error

    def close(self) -> None:
        """Ends the offer too."""
        if self._offer is not None:
            self._offer.close()
        super().close()


class FileOffer:
    """
    Offers the files of a folder to those who know a secret part of the URL, from any byte on.

    Args:
        folder (`Path`): The folder.
        host (`str`): Address to listen at; empty for all.
    """

    def __init__(self, folder: Path, host: str) -> None:
        secret = secrets.token_urlsafe(32)
        wanted = re.compile(rf"/{re.escape(secret)}/([\w-][\w.-]*)")

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                match = wanted.fullmatch(self.path)
                begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))
                try:
                    file = open(folder / match[1], "rb") if match and begin else None  # noqa: SIM115
                except OSError:
                    file = None
                if file is None or begin is None:
                    self.send_error(HTTPStatus.NOT_FOUND)
                    return
                with file:
                    size, offset = file.seek(0, 2), int(begin[1])
                    self.send_response(HTTPStatus.PARTIAL_CONTENT)
                    self.send_header("Content-Range", f"bytes {offset}-{size - 1}/{size}")
                    self.send_header("Content-Length", str(max(0, size - offset)))
                    self.end_headers()
                    try:
                        if offset < size:
                            self.connection.sendfile(file, offset)
                    except OSError:  # the server has gone, or has had enough
                        self.close_connection = True

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self._secret = secret
        threading.Thread(target=self._server.serve_forever, daemon=True, name="mt-grpo-weights").start()

    def url(self, address: str) -> str:
        """The URL of the folder, for somebody who reaches this machine at an address."""
        return f"http://{address}:{self._server.server_address[1]}/{self._secret}"

    def close(self) -> None:
        """Refuses connections."""
        self._server.shutdown()
        self._server.server_close()


def _own_address(url: str) -> str:
    """The address that this machine has in the network of a server. Nothing is sent to find it."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((parts.hostname, parts.port or 80))
        except OSError as error:
            raise WeightSyncError(f"There is no way from here to the vLLM server at {url}: {error}.") from error
        address: str = probe.getsockname()[0]
        return address
