"""Servers in processes of their own. A process that has imported what they need once is forked for each."""

import multiprocessing
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import uvicorn


class ForkedServer:
    """A server, made by `app(said, *options)`, that can be killed and started again at the same address."""

    def __init__(self, app: Callable[..., Any], *options: object) -> None:
        self._app, self._options, self.port = app, options, 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload([self._app.__module__])
        self.said, pipe = forks.Pipe()
        self.process = forks.Process(target=_serve, args=(self.port, pipe, self._app, self._options), daemon=True)
        self.process.start()
        pipe.close()
        self.port = self.said.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.said.close()


def _serve(port: int, said: Connection, app: Callable[..., Any], options: tuple[object, ...]) -> None:
    listening = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(app(said, *options), log_level="error", timeout_graceful_shutdown=1)
    said.send(listening.getsockname()[1])
    uvicorn.Server(config).run(sockets=[listening])
