"""A server of OpenEnv, played over its network protocol; `make interop-games` installs it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest
from support.models import build_tokenizer

from mt_grpo.integrations.openenv import openenv_server
from mt_grpo.integrations.trl import TRLEnv
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.trajectory import StopReason

openenv = pytest.importorskip("openenv.core", reason="openenv is not installed: run `make interop-games`")


@pytest.fixture(scope="module")
def url():
    """An echo server: it earns the length of what it is told, and ends when it is told `bye`."""
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Said(Action):
        message: str

    class Heard(Observation):
        echo: str

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.seed, self.count = seed, 0
            return Heard(echo=f"seed {seed}")

        def step(self, action, timeout_s=None, **kwargs):
            self.count += 1
            done = action.message == "bye"
            return Heard(echo=f"{self.count}: {action.message}", reward=float(len(action.message)), done=done)

        @property
        def state(self):
            return State(step_count=self.count)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=8)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)


def play(env, rows, turns):
    tokenizer = build_tokenizer()
    engine = ScriptedEngine(tokenizer, lambda session, turn: turns[int(session)][turn] + "<|im_end|>")
    requests = [RolloutRequest("Talk.", f"{index:03d}", row) for index, row in enumerate(rows)]
    return asyncio.run(RolloutRunner(env, engine).run(requests, SamplingParams()))


def test_conversations_have_an_episode_each(url):
    env = openenv_server(url, action=lambda text: {"message": text}, observe=lambda seen: seen["echo"])
    first, second = play(env, [{"seed": 3}, {"seed": 4}], [["hello", "bye"], ["bye"]])
    assert first.prompt[0]["content"] == "Talk.\n\nseed 3" and second.prompt[0]["content"] == "Talk.\n\nseed 4"
    assert [turn.replies[0]["content"] for turn in first.turns] == ["1: hello", "2: bye"]
    assert [turn.reward for turn in first.turns] == [5.0, 3.0] and second.env_rewards == {"return": 3.0}
    assert {first.stop_reason, second.stop_reason} == {StopReason.ENV_DONE}, first.error


def test_a_server_that_is_not_there_ends_the_conversation():
    [trajectory] = play(openenv_server("http://127.0.0.1:9", action=str, step_timeout=1.0), [{}], [["hello"]])
    assert trajectory.stop_reason is StopReason.ENV_ERROR and trajectory.error


def test_a_client_in_a_class_of_trl_is_not_left_unexecuted(url):
    """Its calls run in threads without an event loop: there a client gives results, not something to await."""
    from support.trl_environments import called

    class EchoTool:
        def reset(self, **row):
            self.client = openenv.GenericEnvClient(base_url=url)
            return f" {self.client.reset().observation['echo']}"

        def say(self, message: str) -> str:
            """
            Says something.

            Args:
                message: What.
            """
            result = self.client.step({"message": message})
            self.reward = result.reward
            return result.observation["echo"]

        def get_reward(self) -> float:
            return self.reward

        def close(self):
            self.client.close()

    from trl.chat_template_utils import add_response_schema

    tokenizer = build_tokenizer()
    add_response_schema(tokenizer)
    texts = [called("say", message="hello") + "<|im_end|>", "Done.<|im_end|>"]
    runner = RolloutRunner(TRLEnv(EchoTool), ScriptedEngine(tokenizer, lambda session, turn: texts[turn]))
    [trajectory] = asyncio.run(runner.run([RolloutRequest("Talk.", "0")], SamplingParams()))
    assert trajectory.prompt[0]["content"] == "Talk. seed None"
    assert trajectory.turns[0].tool_calls[0].result == "1: hello" and trajectory.env_rewards == {"EchoTool": 5.0}
