"""OpenEnv servers in processes of their own."""

from __future__ import annotations

from multiprocessing.connection import Connection

from fastapi import FastAPI
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from support.forkserver import ForkedServer


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


def app(pipe: Connection, room: int, kind: str) -> FastAPI:
    """`room` environments of a kind, `echo` or another; says a word when one is closed."""
    global said
    said = pipe
    return create_fastapi_app(Echo, Said if kind == "echo" else Number, Heard, max_concurrent_envs=room)


said: Connection
"""To whoever started this server."""


class OpenEnvServer(ForkedServer):
    def __init__(self, room: int = 8, kind: str = "echo") -> None:
        super().__init__(app, room, kind)
