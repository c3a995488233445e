"""OpenEnv servers in processes of their own. A process that has imported OpenEnv once is forked for each."""

from __future__ import annotations

import multiprocessing
import socket
from multiprocessing.connection import Connection

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Said(Action):
    message: str


class Heard(Observation):
    echo: str


class Number(Action):
    number: int


class Echo(Environment):
    """It earns the length of what it is told, and ends when it is told `bye`; `work N` adds N numbers."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.count = 0
        return Heard(echo=f"seed {seed}")

    def step(self, action, timeout_s=None, **kwargs):
        self.count += 1
        word, _, number = action.message.partition(" ")
        if word == "work":
            sum(each % 7 for each in range(int(number)))
        done = action.message == "bye"
        return Heard(echo=f"{self.count}: {action.message}", reward=float(len(action.message)), done=done)

    @property
    def state(self):
        return State(step_count=self.count)

    def close(self):
        said.send("closed")


def serve(port: int, room: int, kind: str, pipe: Connection) -> None:
    """Serves `room` environments of a kind, `echo` or another; sends its port, then a word when one is closed."""
    global said
    said = pipe
    listening = socket.create_server(("127.0.0.1", port))
    app = create_fastapi_app(Echo, Said if kind == "echo" else Number, Heard, max_concurrent_envs=room)
    said.send(listening.getsockname()[1])
    uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)).run(sockets=[listening])


said: Connection
"""To whoever started this server."""


class OpenEnvServer:
    """A server that can be killed, and started again at the same address."""

    def __init__(self, room: int = 8, kind: str = "echo") -> None:
        self.room, self.kind, self.port = room, kind, 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload([__name__])
        self.said, pipe = forks.Pipe()
        self.process = forks.Process(target=serve, args=(self.port, self.room, self.kind, pipe), daemon=True)
        self.process.start()
        pipe.close()
        self.port = self.said.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.said.close()
