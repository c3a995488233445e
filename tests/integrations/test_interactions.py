"""Interactions: chosen by the row, each method really called, and bad files refused with one sentence."""

import asyncio
import json
import re
import time
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from support.conversations import play, user
from support.models import build_tokenizer, lookup
from trl.chat_template_utils import add_response_schema

from mt_grpo.errors import UserError
from mt_grpo.integrations.verl import BaseInteraction, Gsm8kInteraction, InteractionEnv, load_interactions
from mt_grpo.training import MTGRPOConfig
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


def run(interactions, rows, script, options=None, **limits):
    env = InteractionEnv(interactions, **(options or {}))
    return play(env, script, rows, prompt="Q", sanity_check_mode="strict", **limits)


def names(shop):
    return [name for name, _ in shop.calls]


def test_an_interaction_answers_scores_and_is_ended():
    shop = Shop({})
    [trajectory], runner = run({"shop": shop}, [row("shop", word="pears", unset=None)], ["apples", "pears"])
    assert names(shop) == ["start", "generate", "generate", "calculate", "finalize"]
    assert len({instance for _, instance in shop.calls}) == 1
    assert [turn.reward for turn in trajectory.turns] == [0.25, 1.0] and trajectory.env_rewards == {"shop": 2.0}
    assert trajectory.stop_reason is StopReason.ENV_DONE and trajectory.answer == "pears"
    assert [turn.replies for turn in trajectory.turns] == [user("What else?"), user("Thank you.")]
    assert trajectory.info == {"interaction": [{"word": "pears"}]} and trajectory.render_mismatch is None
    assert [message["content"] for message in shop.seen[1]] == ["Q", "apples", "What else?", "pears"]
    completion = runner.completion(trajectory)
    trained = [token for token, mask in zip(completion.ids, completion.mask, strict=True) if mask]
    assert runner.engine.tokenizer.decode(trained) == f"apples{END}pears{END}"


def test_each_row_chooses_its_interaction():
    Plain.ended = 0
    (first, second), _ = run({"shop": Shop({}), "plain": Plain({})}, [row("plain"), row("shop", word="a")], ["a"])
    assert first.turns[0].replies == user("Bye.") and first.turns[0].reward is None
    assert (first.env_rewards, second.env_rewards, Plain.ended) == ({"plain": 0.5}, {"shop": 2.0}, 1)


def test_tools_answer_calls_and_the_interaction_words():
    shop = Shop({})
    turns = [SEARCH, "apples", "<tool>{</tool>", "<answer>pears</answer>"]
    [trajectory], _ = run({"shop": shop}, [row("shop", word="pears")], turns, {"tools": [lookup]})
    results = [turn.replies[0]["content"] for turn in trajectory.turns]
    assert results[:2] == ["<result>about Lima</result>", "What else?"]
    assert results[2].startswith("<result>Error: ") and names(shop).count("generate") == 2
    assert trajectory.answer == "pears" and "lookup" in trajectory.prompt[0]["content"]


def test_native_calls_go_to_tools_too():
    """And reasoning, which the template keeps apart, is not said."""
    shop = Shop({})
    call = '<tool_call>\n{"name": "lookup", "arguments": {"query": "Lima"}}\n</tool_call>'
    env = InteractionEnv({"shop": shop}, tools=[lookup], protocol="native")
    tokenizer = add_response_schema(build_tokenizer("qwen3"))
    turns = [call, "<think>\nno\n</think>\n\npears"]
    [trajectory], _ = play(env, turns, [row("shop", word="pears")], tokenizer=tokenizer)
    assert trajectory.turns[0].replies[0]["content"] == "about Lima" and trajectory.answer == "pears"
    assert [message["role"] for message in shop.seen[0]] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("limits", "steps", "reason"),
    [({}, 0, "max_steps"), ({}, 1, "max_steps"), ({"max_completion_tokens": 12}, 9, "token_budget")],
)
def test_the_last_turn_is_scored_too(limits, steps, reason):
    shop = Shop({})
    [trajectory], _ = run({"shop": shop}, [row("shop", word="pears")], ["a"] * 9, {"max_steps": steps}, **limits)
    assert (trajectory.stop_reason, trajectory.env_rewards) == (reason, {"shop": 2.0})
    assert names(shop) == ["start", *["generate"] * len(trajectory.turns), "calculate", "finalize"]
    assert limits or len(trajectory.turns) == steps + 1


@pytest.mark.parametrize(
    ("fault", "seconds", "error", "called"),
    [
        ("start raises", None, "ConnectionError: the shop is closed", []),
        ("generate raises", None, "ZeroDivisionError: in the shop", ["generate"]),
        ("generate hangs", 0.2, "OutOfTime: Shop.generate_response took longer than 0.2 s.", ["generate"]),
        ("generate is wrong", None, "TypeError: Shop.generate_response returned ('Yes?', 0.5)", ["generate"]),
        ("calculate raises", None, "ValueError: no score", ["generate", "calculate"]),
    ],
)
def test_a_fault_ends_its_conversation_and_is_finalized(fault, seconds, error, called):
    shop = Shop({})
    options = {} if seconds is None else {"tool_timeout": seconds}
    [trajectory], _ = run({"shop": shop}, [row("shop", word="a", fault=fault)], ["a"], options)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and trajectory.error.startswith(error)
    assert names(shop) == ["start", *called, "finalize"]


def test_a_conversation_out_of_time_is_finalized():
    shop = Shop({})
    [trajectory], _ = run({"shop": shop}, [row("shop", fault="generate hangs")], ["a"], rollout_timeout=0.2)
    assert trajectory.stop_reason is StopReason.TIMEOUT and names(shop) == ["start", "generate", "finalize"]


def test_a_finalize_that_raises_is_a_warning(caplog):
    [trajectory], _ = run({"shop": Shop({})}, [row("shop", word="a", fault="finalize raises")], ["a"])
    assert trajectory.stop_reason is StopReason.ENV_DONE and "OSError: cannot close" in caplog.text


@pytest.mark.parametrize("gold", ["72", "48 + 24 = 72\n#### 72", 72])
def test_gsm8k_asks_again_until_it_is_right(gold):
    interactions, rows = {"gsm8k": Gsm8kInteraction({})}, [row("gsm8k", ground_truth=gold)]
    [trajectory], _ = run(interactions, rows, ["It is 7.", "7 no, #### 72"])
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0] and trajectory.env_rewards == {"gsm8k": 1.0}
    assert "not the right answer" in trajectory.turns[0].replies[0]["content"]
    assert trajectory.stop_reason is StopReason.ENV_DONE and not interactions["gsm8k"]._golds
    [trajectory], _ = run(interactions, rows, ["2"] * 3, {"max_steps": 2})
    assert [turn.reward for turn in trajectory.turns] == [0.0] * 3 and trajectory.env_rewards == {"gsm8k": 0.0}


# The file

GSM8K = "mt_grpo.integrations.verl.Gsm8kInteraction"


def write(folder, *entries):
    path = folder / "interactions.yaml"
    path.write_text(yaml.safe_dump({"interaction": list(entries)}))
    return str(path)


SHOP = """
from mt_grpo.integrations.verl import BaseInteraction
class ShopInteraction(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return True, self.config['greeting'], 0.0, {}
"""


def test_a_file_names_interactions(tmp_path):
    (tmp_path / "shop.py").write_text(SHOP)
    shop = {"class_name": f"{tmp_path}/shop.py:ShopInteraction"}
    verls = {"class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction", "config": {}}
    corner = {"name": "corner", **shop, "config": {"greeting": "Hi."}}
    found = load_interactions(write(tmp_path, verls, corner, shop))
    assert list(found) == ["gsm8k", "corner", "shop"] and isinstance(found["gsm8k"], Gsm8kInteraction)
    assert (found["corner"].name, found["corner"].config) == ("corner", {"greeting": "Hi.", "name": "corner"})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "has no list `interaction`"),
        (["gsm8k"], "has no `class_name`"),
        ([{"class_name": "", "config": {}}], "has no `class_name`"),
        ([{"class_name": GSM8K, "confg": {}}], "unknown key 'confg'; the nearest is 'config'"),
        ([{"class_name": GSM8K, "config": [1]}], "has the `config` [1]: give a mapping"),
        ([{"class_name": GSM8K + "s"}], "has no 'Gsm8kInteractions'; the nearest is 'Gsm8kInteraction'"),
        ([{"class_name": "mt_grpo.envs.StepEnv"}], "is no subclass of `BaseInteraction`: import that from"),
        ([{"class_name": "mt_grpo.integrations.verl.BaseInteraction"}], "lacks generate_response: define it."),
        ([{"class_name": GSM8K}, {"class_name": GSM8K}], "are named 'gsm8k': give each a `name` of its own."),
        (None, "cannot be read: No such file"),
        (b"\xff", "cannot be read: it is not text"),
        (b"a: [}", "is not valid YAML: "),
    ],
)
def test_a_wrong_file_is_refused_with_one_sentence(tmp_path, entries, message):
    path = tmp_path / "interactions.yaml"
    if isinstance(entries, bytes):
        path.write_bytes(entries)
    elif entries is not None:
        write(tmp_path, *entries)
    with pytest.raises(UserError) as caught:
        load_interactions(str(path))
    assert message in str(caught.value) and (isinstance(entries, bytes) or "\n" not in str(caught.value))


def config(tmp_path, **options):
    return MTGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **options)


NAMELESS = [[{}], [row("gsm8k"), {"extra_info": {}}], [{"extra_info": "{}"}], [row(None)]]


@pytest.mark.parametrize(
    ("env", "rows", "message"),
    [
        *((None, rows, "A row does not say who answers it") for rows in NAMELESS),
        (None, [row("gsm8")], "A row names the interaction 'gsm8'; the nearest is 'gsm8k': the interactions are gsm"),
        (InteractionEnv({"plain": Plain({})}), [row("gsm8k")], "`interaction_config_file` is set in the arguments, a"),
    ],
)
def test_rows_without_an_interaction_or_two_sources_are_refused(tmp_path, env, rows, message):
    args = config(tmp_path, interaction_config_file=write(tmp_path, {"class_name": GSM8K}))
    dataset = Dataset.from_list([{"prompt": "Q", **each} for each in rows])
    with pytest.raises(UserError) as caught:
        check_env(env, args, dataset)
    assert str(caught.value).startswith(message)


def test_environments_may_have_interactions_of_their_own(tmp_path):
    path = write(tmp_path, {"class_name": GSM8K})
    environments = {"maths": {"interaction_config_file": path}, "tools": {"tools": ["calculator"]}}
    args = config(tmp_path, environments=environments)
    rows = [{"prompt": "Q", "environment": "maths", **row("gsm8k")}, {"prompt": "Q", "environment": "tools"}]
    env = check_env(None, args, Dataset.from_list(rows))
    assert isinstance(env["maths"], InteractionEnv) and not isinstance(env["tools"], InteractionEnv)
    rows[0] |= row("shop")
    with pytest.raises(UserError, match="A row names the interaction 'shop'"):
        check_env(None, args, Dataset.from_list(rows))


def test_the_example_of_the_page_works(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "interactions.md").read_text()
    (code, recipe, listed, line) = (block for _, block in re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL))
    monkeypatch.chdir(tmp_path)
    Path("teacher.py").write_text(code)
    Path("interactions.yaml").write_text(listed)
    rows = [json.loads(line)]
    env = check_env(None, config(tmp_path, **yaml.safe_load(recipe)), Dataset.from_list(rows))
    [trajectory], _ = play(env, ["apple", "pear"], rows)
    assert trajectory.turns[0].replies == user("Think of a fruit.") and trajectory.env_rewards == {"teacher": 0.5}
    assert trajectory.info == {"interaction": [{"tries": 2}]} and not env.interactions["teacher"].tries
