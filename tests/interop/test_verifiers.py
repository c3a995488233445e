"""Environments of verifiers as they are published, 0.3.1 and 0.4; `make interop-verifiers` installs them."""

from __future__ import annotations

import json
import re
import signal
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import yaml
from support.agents import END, calling_tokenizer, check_whole
from support.conversations import play as scripted
from support.models import CPU_RUN, build_model
from support.servers import RealServer, needs_server
from support.trainers import Letters, batch, check_log_probs

from mt_grpo.cli import main
from mt_grpo.errors import ConfigError
from mt_grpo.integrations.verifiers import VerifiersSource
from mt_grpo.rewards import EnvReward
from mt_grpo.runlog import read_trajectories
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.trajectory import StopReason

pytest.importorskip("verifiers", reason="verifiers is not installed: run `make interop-verifiers`")
LEGACY = find_spec("verifiers.legacy") is not None
legacy = pytest.mark.skipif(not LEGACY, reason="needs verifiers 0.3.1")
tasksets = pytest.mark.skipif(LEGACY, reason="needs verifiers 0.4")
ROOT = Path(__file__).parents[2]


def installed(name: str, options: dict) -> VerifiersSource:
    pytest.importorskip(name, reason=f"{name} is not installed: run `make interop-verifiers`")
    return VerifiersSource(name, options)


@pytest.fixture(scope="module")
def tool_test():
    return installed("tool_test", {"num_train_examples": 8})


@pytest.fixture(scope="module")
def kuhn():
    return installed("kuhn_poker", {"select": {"limit": 8}, "eval_select": {"skip": 8, "limit": 4}})


def calling(name: str, /, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(source, says, rows=None, **limits):
    """Conversations of rows in which `says(row, turn)` is what the model says."""
    rows = source.rows().to_list() if rows is None else rows

    def script(session, turn):
        return says(rows[int(session)], turn) + END

    trajectories, runner = scripted(source, script, rows, tokenizer=calling_tokenizer(), **limits)
    for trajectory in trajectories:
        check_whole(trajectory, runner)
    return trajectories


def seen(trajectory):
    """What each agent of a conversation was shown and said, as text."""
    return [calling_tokenizer().decode(one.tokens) for one in trajectory.tree.sequences()]


def train(source, rewards, folder, model=None, **options):
    """Three steps on a tiny model; every sampled token has its log-prob in training."""
    tokenizer = calling_tokenizer()
    limits = {"max_turn_length": 16, "max_completion_length": 400, "learning_rate": 1e-2}
    args = MTGRPOConfig(str(folder), max_steps=3, **{**limits, **CPU_RUN, **options})
    model = model or build_model(tokenizer, max_position_embeddings=4096)
    trainer = MTGRPOEnvTrainer(model, source, [], rewards, args, processing_class=tokenizer)
    if not args.use_vllm:
        check_log_probs(trainer, batch(trainer))
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert trainer.state.global_step == 3
    assert any((old != new).any() for old, new in zip(before, trainer.model.parameters(), strict=True))
    records = list(read_trajectories(folder))
    assert len(records) >= 12 and {record["error"] for record in records} == {None}
    assert all(record["turns"] for record in records)
    if args.use_vllm:
        gaps = [log["sampling/sampling_logp_difference/max"] for log in trainer.state.log_history if "loss" in log]
        assert len(gaps) == 3 and max(gaps) <= 1e-4
    return trainer


@legacy
def test_rewards_are_those_of_verifiers(tool_test, monkeypatch):
    outputs, run = {}, type(tool_test.environment.env).run_rollout

    async def recorded(self, example, *args):
        outputs[example["example_id"]] = output = await run(self, example, *args)
        return output

    monkeypatch.setattr(type(tool_test.environment.env), "run_rollout", recorded)

    def says(row, turn):
        names = re.findall("tool_[A-D]", row["prompt"][0]["content"])
        return "\n".join(calling(name, x=1) for name in (names if row["example"] % 2 else names[1:])) or "None."

    trajectories = play(tool_test, says)
    rewards = [trajectory.env_rewards for trajectory in trajectories]
    assert rewards == [{"tool_call_reward_func": float(index % 2)} for index in range(8)]
    for index, trajectory in enumerate(trajectories):
        assert sum(trajectory.env_rewards.values()) == outputs[index]["reward"]
        assert trajectory.info["metrics"] == outputs[index]["metrics"]
        assert trajectory.info["metrics"]["total_tool_calls"] == len(trajectory.turns[0].tool_calls)
        assert trajectory.stop_reason is StopReason.ENV_DONE and trajectory.tree.num_sequences == 1


@pytest.mark.parametrize(
    ("fixture", "reward"),
    [
        pytest.param("tool_test", "env_reward", marks=legacy),
        pytest.param("kuhn", EnvReward("player0/payoff"), marks=tasksets),
    ],
)
def test_an_environment_trains_for_three_steps(fixture, reward, request, tmp_path):
    trainer = train(request.getfixturevalue(fixture), [reward, Letters()], tmp_path)
    assert fixture == "kuhn" or {"prompt", "answer", "example", "split"} <= set(trainer.train_dataset.column_names)


def register(monkeypatch, **env):
    """A module `own_env` with an environment of verifiers 0.3.1."""
    import verifiers as vf
    from datasets import Dataset

    async def shout(word: str) -> str:
        """
        Shouts.

        Args:
            word: What.
        """
        if word == "die":
            raise vf.Error("the tool died")
        return word.upper()

    def long(completion) -> float:
        return float(len(completion))

    def loud(completion) -> float:
        return float(any("HEY" in str(message.content) for message in completion))

    rows = Dataset.from_dict({"question": [f"Q{index}" for index in range(4)], "answer": ["A"] * 4})

    def load_environment(**options):
        rubric = vf.Rubric(funcs=[long, loud], weights=[0.5, 2.0])
        return vf.ToolEnv(**{"dataset": rows, "rubric": rubric, "tools": [shout], "max_turns": 3, **env, **options})

    module = types.ModuleType("own_env")
    module.load_environment = load_environment
    monkeypatch.setitem(sys.modules, "own_env", module)


@legacy
def test_each_function_is_a_reward_with_its_weight(monkeypatch):
    register(monkeypatch)
    turns = [calling("shout", word="hey"), "Done."]
    for trajectory in play(VerifiersSource("own_env"), lambda row, turn: turns[turn]):
        assert trajectory.env_rewards == {"long": 1.5, "loud": 2.0} and trajectory.tree.num_sequences == 1
        assert trajectory.turns[0].tool_calls[0].result == "HEY"


@legacy
def test_limits_and_failures_end_conversations_alone(monkeypatch):
    register(monkeypatch, stop_errors=[Exception])

    def says(row, turn):
        return calling("shout", word="die" if row["example"] == 0 else "on") if row["example"] < 2 else "Done."

    dead, endless, *others = play(VerifiersSource("own_env"), says)
    assert dead.stop_reason is StopReason.ENV_ERROR and "the tool died" in dead.error and len(dead.turns) == 1
    assert endless.stop_reason is StopReason.MAX_STEPS and len(endless.turns) == 3 and endless.env_rewards
    assert [trajectory.stop_reason for trajectory in others] == [StopReason.ENV_DONE] * 2
    source = VerifiersSource("own_env")
    rows = source.rows().to_list()[:1]
    [full] = play(source, lambda row, turn: calling("shout", word="on" * 20), rows, max_completion_tokens=60)
    assert full.stop_reason is StopReason.TOKEN_BUDGET and full.error is None
    [unknown] = play(source, says, [{"prompt": "Q", "example": None}])
    assert unknown.stop_reason is StopReason.ENV_ERROR and "example=None" in unknown.error


@legacy
def test_signals_stay_those_of_the_run(monkeypatch):
    register(monkeypatch)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    VerifiersSource("own_env")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@legacy
def test_a_rubric_that_compares_a_group_is_refused(monkeypatch):
    import verifiers as vf

    def best(completions) -> list:
        return [1.0] * len(completions)

    register(monkeypatch, rubric=vf.Rubric(funcs=[best]))
    with pytest.raises(ConfigError, match="scores conversations of a group together"):
        VerifiersSource("own_env")


@tasksets
def test_a_taskset_of_two_agents_has_rewards_of_each(kuhn):
    from kuhn_poker.taskset import payoff

    def says(row, turn):
        return ["[check]", "[bet]", "[call]"][turn] if row["example"] else "I fold my [cards]."

    forfeit, *hands = play(kuhn, says)
    assert forfeit.env_rewards == {"player0/payoff": -1.0, "player1/payoff": 1.0} and len(forfeit.turns) == 2
    for hand in hands:
        cards = dict(re.search("as Player (.).*private card: (.)", text, re.DOTALL).groups() for text in seen(hand))
        chips = float(payoff("check-bet-call", [cards["0"], cards["1"]]))
        assert hand.env_rewards == {"player0/payoff": chips, "player1/payoff": -chips} and len(hand.turns) == 3
        assert hand.tree.num_sequences == 2, "a root for each agent"
    assert kuhn.rows("eval")["example"] == [0, 1, 2, 3]


@needs_server
@pytest.mark.server
@pytest.mark.slow
def test_an_environment_trains_on_a_real_server(request, tmp_path):
    source = request.getfixturevalue("tool_test" if LEGACY else "kuhn")
    folder = str(tmp_path / "model")
    build_model(calling_tokenizer(), max_position_embeddings=4096, head_dim=32).save_pretrained(folder)
    calling_tokenizer().save_pretrained(folder)
    server = RealServer(folder, tmp_path / "server.log", "--vllm_max_model_length", "4096").start()
    try:
        reward = "env_reward" if LEGACY else EnvReward("player0/payoff")
        train(source, [reward, Letters()], tmp_path, folder, use_vllm=True, vllm_server_base_url=server.url)
    finally:
        server.stop()


@tasksets
@pytest.mark.slow
def test_tool_servers_of_a_taskset_end_with_it():
    source = installed("glossary", {"select": {"limit": 2}})

    def says(row, turn):
        name = re.search('"(.*?)"', row["prompt"][0]["content"])[1]
        right = row["answer"] if row["example"] else "nothing"
        return [calling("facts_lookup", name=name), f"<answer>{right}</answer>"][turn]

    wrong, right = play(source, says)
    assert (wrong.env_rewards, right.env_rewards) == ({"looked_up": 0.0}, {"looked_up": 1.0})
    assert right.turns[0].tool_calls[0].result == source.rows()[1]["answer"] and right.tree.num_sequences == 1
    lines = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert not [line for line in lines if "glossary" in line]


@tasksets
@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "set `select` in `env_config`"),
        ({"select": {"limit": 0}}, "look at `env_config`"),
        ({"agents": 3}, "look at `env_config`"),
        ({"select": {"limit": 1}}, "Nothing says which tasks of 'kuhn_poker' are evaluated"),
    ],
)
def test_a_taskset_that_cannot_be_read_is_refused(config, problem):
    with pytest.raises(ConfigError, match=problem):
        installed("kuhn_poker", config).rows("eval")


def test_an_environment_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="verifiers cannot load the environment 'no-such-thing'"):
        VerifiersSource("no-such-thing")


@pytest.mark.slow
def test_the_recipe_of_the_page_needs_no_dataset(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "any_agent.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(env: verifiers:.*?)```", page, re.DOTALL)]
    block = blocks[0 if LEGACY else 1]
    name = block["env"].partition(":")[2]
    pytest.importorskip(name, reason=f"{name} is not installed: run `make interop-verifiers`")
    options = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    for option in "dataset_name dataset_train_split dataset_test_split tools system_prompt".split():
        del options[option]
    del options["turn_reward_funcs"], options["max_env_steps"]
    options |= {"call_protocol": "tags", "max_turn_length": 12, "max_steps": 1, "per_device_train_batch_size": 8}
    options |= block
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(yaml.safe_dump(options))
    assert main(["train", "recipe.yaml", "--output_dir", "run"]) == 0
    for record in read_trajectories("run"):
        assert record["error"] is None and record["rewards"]["outcome"].keys() == {"env_reward"}


@legacy
@pytest.mark.parametrize("reached", [True, False])
def test_a_judge_that_cannot_be_reached_is_a_failure(monkeypatch, reached):
    """A reward function that fails for another reason stays a reward of 0, as verifiers has it."""
    import httpx
    import openai
    import verifiers as vf
    from datasets import Dataset

    async def judged(completion, judge, prompt, answer, state):
        return float("yes" in await judge(prompt, completion, answer, state))

    def broken(completion):
        raise KeyError("no such word")

    def answer(request):
        if not reached:
            raise httpx.ConnectError("refused")
        message = {"role": "assistant", "content": "yes"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return httpx.Response(200, json=answer)

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    client = openai.AsyncOpenAI(base_url="http://judge/v1", api_key="x", http_client=http, max_retries=0)
    rubric = vf.JudgeRubric(judge_client=client, judge_model="m")
    rubric.add_reward_func(judged)
    data = Dataset.from_list([{"question": "Q1", "answer": "A"}])
    env = vf.SingleTurnEnv(dataset=data, rubric=vf.RubricGroup([rubric, vf.Rubric([broken])]))
    monkeypatch.setattr(vf, "load_environment", lambda name, **options: env)
    (trajectory,) = play(VerifiersSource("judged"), lambda row, turn: "A")
    if reached:
        assert trajectory.error is None and trajectory.env_rewards["judged"] == 1.0
    else:
        assert trajectory.stop_reason is StopReason.ENV_ERROR and "judged failed" in trajectory.error
