"""Servers of OpenEnv, in processes of their own: played, full, dead, back, foreign; `make interop-games`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections import Counter

import pytest
from support.loopback import ScriptedServer
from support.models import build_tokenizer
from support.trl_environments import called
from trl.chat_template_utils import add_response_schema

from mt_grpo.errors import ConfigError
from mt_grpo.integrations import openenv as ours
from mt_grpo.integrations.openenv import openenv_server
from mt_grpo.integrations.trl import TRLEnv
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.servers.external import ServerLost

openenv = pytest.importorskip("openenv.core", reason="openenv is not installed: run `make interop-games`")
from support.openenv_server import OpenEnvServer  # noqa: E402  # it imports OpenEnv


@pytest.fixture
def servers():
    made = []

    def make(number, **options):
        made.extend(OpenEnvServer(**options) for _ in range(number))
        return made[-number:]

    yield make
    for server in made:
        if server.process.is_alive():
            server.kill()


def pool_of(*servers, **options):
    urls = [server if isinstance(server, str) else server.url for server in servers]
    return openenv_server(urls, action=lambda text: {"message": text}, observe=lambda seen: seen["echo"], **options)


class InStep(ScriptedEngine):
    """No conversation has its second turn before all have had their first."""

    def __init__(self, tokenizer, say, number):
        super().__init__(tokenizer, say)
        self.begun, self.all_begun = set(), asyncio.Barrier(number)

    async def generate(self, context, sampling, session):
        if session in self.begun:
            await self.all_begun.wait()
        self.begun.add(session)
        return await super().generate(context, sampling, session)


def play(env, number, turns=("hello", "bye"), before_turn=None):
    tokenizer = add_response_schema(build_tokenizer())

    def say(session, turn):
        if before_turn is not None:
            before_turn(turn)
        return turns[turn] + "<|im_end|>"

    requests = [RolloutRequest("Talk.", f"{index:03d}", {"seed": index}) for index in range(number)]
    engine = InStep(tokenizer, say, number) if before_turn is not None else ScriptedEngine(tokenizer, say)
    return asyncio.run(RolloutRunner(env, engine).run(requests, SamplingParams()))


def reasons(trajectories):
    return Counter(each.stop_reason for each in trajectories)


def test_conversations_have_an_episode_each(servers):
    first, second = play(pool_of(*servers(1)), 2)
    assert first.prompt[0]["content"] == "Talk.\n\nseed 0" and second.prompt[0]["content"] == "Talk.\n\nseed 1"
    assert [turn.replies[0]["content"] for turn in first.turns] == ["1: hello", "2: bye"]
    assert [turn.reward for turn in first.turns] == [5.0, 3.0] and second.env_rewards == {"return": 8.0}
    assert reasons([first, second]) == {"env_done": 2}, first.error


def test_a_client_in_a_class_of_trl_is_not_left_unexecuted(servers):
    """Its calls run in threads without an event loop: there a client gives results, not something to await."""
    [one] = servers(1)

    class EchoTool:
        def reset(self, **row):
            self.client = openenv.GenericEnvClient(base_url=one.url)
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

    [trajectory] = play(TRLEnv(EchoTool), 1, (called("say", message="hello"), "Done."))
    assert trajectory.prompt[0]["content"] == "Talk. seed None"
    assert trajectory.turns[0].tool_calls[0].result == "1: hello" and trajectory.env_rewards == {"EchoTool": 5.0}


def test_conversations_wait_for_a_server_with_room_for_one(servers, caplog):
    [one] = servers(1, room=1)  # OpenEnv's default
    assert reasons(play(pool_of(one), 6)) == {"env_done": 6}
    assert f"The OpenEnv server at {one.url} is full: conversations wait for room." in caplog.text


def test_a_killed_server_ends_its_conversations_and_comes_back(servers, caplog):
    first, second = servers(2)
    env = pool_of(first, second)
    killed = []

    def kill(turn):
        if turn == 1 and not killed:
            killed.append(first.kill())

    done = play(env, 6, before_turn=kill)
    assert reasons(done) == {"env_error": 3, "env_done": 3}
    lost = [each.error for each in done if each.error]
    assert all(f"The OpenEnv server at {first.url}, which this conversation used, is gone" in each for each in lost)
    assert reasons(play(env, 4)) == {"env_done": 4}  # all on the second
    first.start()
    env.pool._hosts[first.url].rests = 1.0  # as if its rest were over
    assert reasons(play(env, 4)) == {"env_done": 4}
    assert f"The OpenEnv server at {first.url} is back." in caplog.text
    first.kill()
    second.kill()
    done = play(pool_of(first, second, step_timeout=1.0), 3)
    assert reasons(done) == {"env_error": 3} and all("No OpenEnv server can be reached" in each.error for each in done)


def test_a_restart_between_turns_ends_the_conversation(servers):
    [one] = servers(1)

    async def go_on():
        game = pool_of(one).make()
        await game.reset(seed=0)
        connection = ours._connection(game._client)
        one.kill()
        one.start()
        while connection.state.name != "CLOSED":
            await asyncio.sleep(0)
        with pytest.raises(ServerLost, match="is gone: it closed the connection"):
            await game.step({"message": "hello"})
        await game.close()

    asyncio.run(go_on())


TRAINER = """
import asyncio, sys
from mt_grpo.integrations.openenv import openenv_server
async def hold():
    games = [openenv_server(sys.argv[1], action=str).make() for _ in range(3)]
    await asyncio.gather(*(game.reset(seed=0) for game in games))
    print("begun", flush=True)
    await asyncio.Event().wait()
asyncio.run(hold())
"""


def test_environments_end_with_a_trainer_that_is_killed(servers):
    [one] = servers(1, room=3)
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, one.url], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "begun\n"
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    assert [one.said.recv() for _ in range(3)] == ["closed"] * 3
    assert reasons(play(pool_of(one), 3)) == {"env_done": 3}


# Before a run


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(ours, "CHECK_SECONDS", 0.2)


def refusal(env) -> str:
    with pytest.raises(ConfigError) as refused:
        asyncio.run(env.check())
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_server_that_is_down_is_named_and_the_run_goes_on(servers, impatient, caplog):
    caplog.set_level(logging.WARNING)
    one, other = servers(2)
    asyncio.run(pool_of(one, other).check())
    assert not caplog.records
    asyncio.run(pool_of(one, "http://127.0.0.1:9").check())
    [said] = caplog.records
    assert said.message.startswith("1 of the 2 servers of `url` cannot be reached (http://127.0.0.1:9: ConnectionRef")


def test_no_server_is_refused(impatient):
    said = refusal(openenv_server(action=str).at("http://127.0.0.1:[8-9]"))
    assert said.startswith("Cannot reach any of the 2 servers of `environment_urls` (http://127.0.0.1:8: ")
    assert said.endswith(": start it, or correct the address.")


def test_a_port_that_answers_something_else_is_refused(servers, impatient):
    [one] = servers(1)
    web = ScriptedServer(lambda *request: (404, {"detail": "Not Found"}))
    try:
        assert refusal(pool_of(one, web.url)).startswith(f"`url: {web.url}` is no OpenEnv server (InvalidStatus: ")
    finally:
        web.stop()


def test_a_server_of_another_environment_is_refused(servers):
    [one], [other] = servers(1), servers(1, kind="sum")
    told = f"`url` names servers of different environments: {one.url} and {other.url} take other actions"
    assert refusal(pool_of(one, other)).startswith(told)
