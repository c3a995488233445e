"""Interactions: chosen by the row, each method really called, and bad files refused with one sentence."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from support.conversations import user
from support.models import CPU_RUN, build_model, build_tokenizer, lookup
from support.trainers import Calls
from trl.chat_template_utils import add_response_schema

from mt_grpo.errors import UserError
from mt_grpo.integrations.verl import BaseInteraction, Gsm8kInteraction, InteractionEnv, load_interactions
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.runlog import read_trajectories
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.training.environment import check_env
from mt_grpo.trajectory import StopReason

END = "<|im_end|>"
SEARCH = '<tool>{"name": "lookup", "args": {"query": "Lima"}}</tool>'


class Shop(BaseInteraction):
    """Wants the word of its row, and does what its row says on the way."""

    def __init__(self, config):
        super().__init__(config)
        self.calls, self.seen = [], []

    async def start_interaction(self, instance_id=None, word="", fault=None, **kwargs):
        self.calls.append(("start", instance_id))
        if fault == "start raises":
            raise ConnectionError("the shop is closed")
        return instance_id

    async def generate_response(self, instance_id, messages, word="", fault=None, **kwargs):
        self.calls.append(("generate", instance_id))
        self.seen.append(json.loads(json.dumps(messages)))
        messages.clear()  # it may do with them what it likes
        match fault:
            case "generate raises":
                raise ZeroDivisionError("in the shop")
            case "generate hangs":
                await asyncio.Event().wait()
            case "generate is wrong":
                return "Yes?", 0.5
        done = word in self.seen[-1][-1]["content"]
        return done, "Thank you." if done else "What else?", 1.0 if done else 0.25, {"word": word} if done else {}

    async def calculate_score(self, instance_id, fault=None, **kwargs):
        self.calls.append(("calculate", instance_id))
        if fault == "calculate raises":
            raise ValueError("no score")
        return 2.0

    async def finalize_interaction(self, instance_id, **kwargs):
        self.calls.append(("finalize", instance_id))
        if kwargs.get("fault") == "finalize raises":
            raise OSError("cannot close")


class Plain(BaseInteraction):
    """Blocks, and declares the methods that verl never calls as verl does."""

    ended = 0

    def generate_response(self, instance_id, messages, **kwargs):
        time.sleep(0.01)
        return True, "Bye.", None, None

    async def calculate_score(self):
        return 0.5

    def finalize_interaction(self):
        Plain.ended += 1


def row(name, **kwargs):
    return {"extra_info": {"index": 0, "interaction_kwargs": {"name": name, **kwargs}}}


def run(interactions, rows, script, limits=None, **options):
    env = InteractionEnv(interactions, **options)
    engine = ScriptedEngine(build_tokenizer(), lambda session, turn: script[turn] + END)
    runner = RolloutRunner(env, engine, limits, sanity_check_mode="strict")
    requests = [RolloutRequest("Q", f"{index:03d}", each) for index, each in enumerate(rows)]
    return asyncio.run(runner.run(requests, SamplingParams())), runner


def names(shop):
    return [name for name, _ in shop.calls]


def test_an_interaction_answers_scores_and_is_ended():
    shop = Shop({})
    [trajectory], runner = run({"shop": shop}, [row("shop", word="pears", unset=None)], ["apples", "pears"])
    assert names(shop) == ["start", "generate", "generate", "calculate", "finalize"]
    assert len({instance for _, instance in shop.calls}) == 1
    assert [turn.reward for turn in trajectory.turns] == [0.25, 1.0] and trajectory.env_rewards == {"shop": 2.0}
    assert trajectory.stop_reason is StopReason.ENV_DONE and trajectory.answer == "pears"
    assert trajectory.turns[0].replies == user("What else?") and trajectory.turns[1].replies == user("Thank you.")
    assert trajectory.info == {"interaction": [{"word": "pears"}]}
    assert [message["content"] for message in shop.seen[1]] == ["Q", "apples", "What else?", "pears"]
    assert trajectory.render_mismatch is None
    completion = runner.completion(trajectory)
    trained = [token for token, mask in zip(completion.ids, completion.mask, strict=True) if mask]
    assert runner.engine.tokenizer.decode(trained) == f"apples{END}pears{END}"


def test_each_row_chooses_its_interaction():
    shop, plain = Shop({}), Plain({})
    (first, second), _ = run({"shop": shop, "plain": plain}, [row("plain"), row("shop", word="a")], ["a"])
    assert first.turns[0].replies == user("Bye.") and first.turns[0].reward is None
    assert first.env_rewards == {"plain": 0.5} and second.env_rewards == {"shop": 2.0}
    assert Plain.ended == 1


def test_tools_answer_calls_and_the_interaction_words():
    shop = Shop({})
    turns = [SEARCH, "apples", "<tool>{</tool>", "<answer>pears</answer>"]
    [trajectory], _ = run({"shop": shop}, [row("shop", word="pears")], turns, tools=[lookup])
    results = [turn.replies[0]["content"] for turn in trajectory.turns]
    assert results[0] == "<result>about Lima</result>" and results[1] == "What else?"
    assert results[2].startswith("<result>Error: ") and names(shop).count("generate") == 2
    assert trajectory.answer == "pears" and "lookup" in trajectory.prompt[0]["content"]


def test_native_calls_go_to_tools_too():
    """And reasoning, which the template keeps apart, is not said."""
    shop = Shop({})
    call = '<tool_call>\n{"name": "lookup", "arguments": {"query": "Lima"}}\n</tool_call>'
    turns = [call, "<think>\nno\n</think>\n\npears"]
    tokenizer = add_response_schema(build_tokenizer("qwen3"))
    engine = ScriptedEngine(tokenizer, lambda session, turn: turns[turn] + END)
    env = InteractionEnv({"shop": shop}, tools=[lookup], protocol="native")
    request = RolloutRequest("Q", "0", row("shop", word="pears"))
    [trajectory] = asyncio.run(RolloutRunner(env, engine).run([request], SamplingParams()))
    assert trajectory.turns[0].replies[0]["content"] == "about Lima" and trajectory.answer == "pears"
    assert [message["role"] for message in shop.seen[0]] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("limits", "steps", "reason"),
    [
        (None, 0, StopReason.MAX_STEPS),
        (None, 1, StopReason.MAX_STEPS),
        (RolloutLimits(12), 9, StopReason.TOKEN_BUDGET),
    ],
)
def test_the_last_turn_is_scored_too(limits, steps, reason):
    shop = Shop({})
    [trajectory], _ = run({"shop": shop}, [row("shop", word="pears")], ["a"] * 9, limits, max_steps=steps)
    assert trajectory.stop_reason is reason and trajectory.env_rewards == {"shop": 2.0}
    assert names(shop) == ["start", *["generate"] * len(trajectory.turns), "calculate", "finalize"]
    assert limits or len(trajectory.turns) == steps + 1


@pytest.mark.parametrize(
    ("fault", "options", "error", "called"),
    [
        ("start raises", {}, "ConnectionError: the shop is closed", []),
        ("generate raises", {}, "ZeroDivisionError: in the shop", ["generate"]),
        (
            "generate hangs",
            {"tool_timeout": 0.2},
            "OutOfTime: Shop.generate_response took longer than 0.2 s.",
            ["generate"],
        ),
        ("generate hangs", {"limits": RolloutLimits(rollout_timeout=0.2)}, None, ["generate"]),
        ("generate is wrong", {}, "TypeError: Shop.generate_response returned ('Yes?', 0.5)", ["generate"]),
        ("calculate raises", {}, "ValueError: no score", ["generate", "calculate"]),
    ],
)
def test_a_fault_ends_its_conversation_and_is_finalized(fault, options, error, called):
    shop = Shop({})
    [trajectory], _ = run({"shop": shop}, [row("shop", word="a", fault=fault)], ["a"], **options)
    assert trajectory.stop_reason is (StopReason.ENV_ERROR if error else StopReason.TIMEOUT)
    assert error is None or trajectory.error.startswith(error)
    assert names(shop) == ["start", *called, "finalize"]


def test_a_finalize_that_raises_is_a_warning(caplog):
    [trajectory], _ = run({"shop": Shop({})}, [row("shop", word="a", fault="finalize raises")], ["a"])
    assert trajectory.stop_reason is StopReason.ENV_DONE and "OSError: cannot close" in caplog.text


def test_gsm8k_scores_zero_where_it_never_is():
    [trajectory], _ = run({"gsm8k": Gsm8kInteraction({})}, [row("gsm8k", ground_truth="1")], ["2"] * 3, max_steps=2)
    assert [turn.reward for turn in trajectory.turns] == [0.0] * 3 and trajectory.env_rewards == {"gsm8k": 0.0}


@pytest.mark.parametrize("gold", ["72", "48 + 24 = 72\n#### 72", 72])
def test_gsm8k_asks_again_until_it_is_right(gold):
    interaction = Gsm8kInteraction({})
    [trajectory], _ = run({"gsm8k": interaction}, [row("gsm8k", ground_truth=gold)], ["It is 7.", "7 no, #### 72"])
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0] and trajectory.env_rewards == {"gsm8k": 1.0}
    assert "not the right answer" in trajectory.turns[0].replies[0]["content"]
    assert trajectory.stop_reason is StopReason.ENV_DONE and not interaction._golds


# The file

GSM8K = "mt_grpo.integrations.verl.Gsm8kInteraction"


def write(folder, *entries):
    path = folder / "interactions.yaml"
    path.write_text(yaml.safe_dump({"interaction": list(entries)}))
    return str(path)


def test_a_file_names_interactions(tmp_path):
    (tmp_path / "shop.py").write_text(
        "from mt_grpo.integrations.verl import BaseInteraction\n"
        "class ShopInteraction(BaseInteraction):\n"
        "    async def generate_response(self, instance_id, messages, **kwargs):\n"
        "        return True, self.config['greeting'], 0.0, {}\n"
    )
    path = write(
        tmp_path,
        {"class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction", "config": {}},
        {"name": "corner", "class_name": f"{tmp_path}/shop.py:ShopInteraction", "config": {"greeting": "Hi."}},
        {"class_name": f"{tmp_path}/shop.py:ShopInteraction"},
    )
    found = load_interactions(path)
    assert list(found) == ["gsm8k", "corner", "shop"] and isinstance(found["gsm8k"], Gsm8kInteraction)
    assert (found["corner"].name, found["corner"].config) == ("corner", {"greeting": "Hi.", "name": "corner"})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "has no list `interaction`"),
        (["gsm8k"], "has no `class_name`"),
        ([{"class_name": "", "config": {}}], "has no `class_name`"),
        ([{"class_name": GSM8K, "confg": {}}], "unknown key 'confg'; the nearest is 'config'"),
        ([{"class_name": GSM8K, "config": [1]}], "`config` of the interaction"),
        ([{"class_name": GSM8K + "s"}], "has no 'Gsm8kInteractions'; the nearest is 'Gsm8kInteraction'"),
        ([{"class_name": "mt_grpo.envs.StepEnv"}], "is no subclass of `BaseInteraction`: import that from"),
        ([{"class_name": "mt_grpo.integrations.verl.BaseInteraction"}], "lacks generate_response: define it."),
        ([{"class_name": GSM8K}, {"class_name": GSM8K}], "are named 'gsm8k': give each a `name` of its own."),
    ],
)
def test_a_wrong_file_is_refused_with_one_sentence(tmp_path, entries, message):
    with pytest.raises(UserError) as caught:
        load_interactions(write(tmp_path, *entries))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read: No such file"), (b"\xff", "cannot be read: it is not text"), (b"a: [}", "is not YAML: ")],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "bad.yaml").write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_interactions(str(tmp_path / "bad.yaml"))


def config(tmp_path, **options):
    return MTGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **options)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{}], "A row does not say who answers it"),
        ([row("gsm8k"), {"extra_info": {}}], "A row does not say who answers it"),
        ([row("gsm8")], "A row names the interaction 'gsm8'; the nearest is 'gsm8k': the interactions are gsm8k."),
    ],
)
def test_rows_that_name_no_interaction_are_refused(tmp_path, rows, message):
    args = config(tmp_path, interaction_config_file=write(tmp_path, {"class_name": GSM8K}))
    dataset = Dataset.from_list([{"prompt": "Q", **each} for each in rows])
    with pytest.raises(UserError) as caught:
        check_env(None, args, dataset)
    assert str(caught.value).startswith(message)


def test_environments_may_have_interactions_of_their_own(tmp_path):
    path = write(tmp_path, {"class_name": GSM8K})
    environments = {"maths": {"interaction_config_file": path}, "tools": {"tools": ["calculator"]}}
    rows = [{"prompt": "Q", "environment": "maths", **row("gsm8k")}, {"prompt": "Q", "environment": "tools"}]
    env = check_env(None, config(tmp_path, environments=environments), Dataset.from_list(rows))
    assert isinstance(env["maths"], InteractionEnv) and not isinstance(env["tools"], InteractionEnv)
    rows[0] |= row("shop")
    with pytest.raises(UserError, match="A row names the interaction 'shop'"):
        check_env(None, config(tmp_path, environments=environments), Dataset.from_list(rows))


def test_an_interaction_beside_an_env_by_hand_is_refused(tmp_path):
    args = config(tmp_path, interaction_config_file=write(tmp_path, {"class_name": GSM8K}))
    with pytest.raises(
        UserError, match="`interaction_config_file` is set in the arguments, and the trainer was given"
    ):
        check_env(InteractionEnv({"plain": Plain({})}), args)


def test_the_example_of_the_page_works(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "interactions.md").read_text()
    (code, recipe, listed, line) = (block for _, block in re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL))
    monkeypatch.chdir(tmp_path)
    Path("teacher.py").write_text(code)
    Path("interactions.yaml").write_text(listed)
    args = config(tmp_path, **yaml.safe_load(recipe))
    env = check_env(None, args, Dataset.from_list([json.loads(line)]))
    script = ScriptedEngine(build_tokenizer(), lambda session, turn: ["apple", "pear"][turn] + END)
    request = RolloutRequest("Which fruit?", "0", json.loads(line))
    [trajectory] = asyncio.run(RolloutRunner(env, script).run([request], SamplingParams()))
    assert trajectory.turns[0].replies == user("Think of a fruit.") and trajectory.env_rewards == {"teacher": 0.5}
    assert trajectory.info == {"interaction": [{"tries": 2}]} and not env.interactions["teacher"].tries


def test_training_learns_from_an_interaction(tmp_path):
    """Two groups a step: half of each group is right at once, the other half never."""
    tokenizer = build_tokenizer()
    rows = [{"prompt": user(f"What is {number}"), **row("gsm8k", ground_truth=str(number))} for number in range(2)]

    def script(session, turn):
        group, member = divmod(int(session.rsplit("-", 1)[1]), 4)
        return (str(group) if member % 2 else "9") + END

    args = MTGRPOConfig(
        str(tmp_path),
        **{**CPU_RUN, "per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 1},
        interaction_config_file=write(tmp_path, {"class_name": GSM8K}),
        max_env_steps=1,
        max_completion_length=200,
        shuffle_dataset=False,
    )
    trainer = MTGRPOEnvTrainer(
        build_model(tokenizer),
        None,
        [Calls()],
        ["env_reward"],
        args,
        Dataset.from_list(rows),
        engine=ScriptedEngine(tokenizer, script),
        processing_class=tokenizer,
    )
    trainer.train()
    written = list(read_trajectories(tmp_path))
    assert sorted(line["env_rewards"]["gsm8k"] for line in written) == [0.0] * 4 + [1.0] * 4
    assert sorted(len(line["turns"]) for line in written) == [1] * 4 + [2] * 4
    assert not trainer.env.interactions["gsm8k"]._golds
