"""The race against TRL's trainer: both sides are given the same, and the page has the committed figures."""

import json
import random
import statistics

import pytest
from support.benchmarks import ROOT, between
from transformers import AutoTokenizer

from mt_grpo.data import embedded
from mt_grpo.rewards import load_rewards

PROMPT = [{"role": "user", "content": "What is the capital of Peru?"}]


def called(query: str, name: str = "search") -> dict:
    call = {"type": "function", "function": {"name": name, "arguments": {"query": query}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def replied(text: str) -> dict:
    return {"role": "tool", "name": "search", "content": text}


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("completion", "rewards"),
    [
        ([called("capital Peru"), replied("Peru: The capital of Peru is Lima."), said("Lima")], [0.2, 0.5, 1.0, 0.5]),
        ([called("capital Peru"), replied("No results."), said("done Lima")], [0.2, 0.0, 0.0, 0.5]),
        ([called("x", "lookup"), replied("{'error': 'Tool lookup not found.'}"), said("Lima")], [0.0, None, 1.0, 0.5]),
        ([said('<tool_call>\n{"name": "search", "arg</tool_call>')], [0.0, None, 0.0, 0.0]),
        ([said("Quito")], [None, None, 0.0, 0.0]),
    ],
    ids=["found", "not found", "unknown tool", "unreadable call", "guessed"],
)
def test_trl_is_given_the_rewards_of_our_conversations(bench, completion, rewards):
    task = bench.race_task
    ours = (*load_rewards(task.TURN_REWARDS, "turn"), *load_rewards(task.OUTCOME_REWARDS, "outcome"))
    found = [task.in_trl(each)([PROMPT], [completion], trainer_state=None, answer=[["Lima"]])[0] for each in ours]
    assert found == rewards


def test_both_trainers_sample_from_the_same_prompt(bench, tmp_path):
    race = bench.race
    bench.race_task.teach(tmp_path / "model", steps=1, size=1)
    plan = race.Plan(steps=1, batch=8)
    theirs, ours = (
        race.build(race.Job(arm, 1), plan, tmp_path / "model", str(tmp_path / arm)) for arm in list(race.ARMS)[:2]
    )
    row = ours.train_dataset[0]
    (prompt,) = theirs._tokenize_prompts([row["prompt"]])[0]
    assert ours.runner.renderer.prompt_ids(ours.env.start(row["prompt"])) == prompt
    names = ["learning_rate", "beta", "loss_type", "num_generations", "max_steps", "temperature"]
    for name in (*names, "max_completion_length"):
        assert getattr(theirs.args, name) == getattr(ours.args, name), name
    assert theirs.reward_func_names == ours.reward_func_names


def test_the_taught_conversations_are_what_the_template_writes(bench):
    task = bench.race_task
    tokenizer, draw = AutoTokenizer.from_pretrained(f"{embedded.__path__[0]}/model"), random.Random(3)
    for _ in range(20):
        trace = task.make_trace(draw, (1, 2), habits=False)
        pieces = task.native(trace)
        question = trace[0][0].split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        messages = [{"role": "system", "content": "Search, then answer."}, {"role": "user", "content": question}]
        for (text, _), (piece, learn) in zip(trace[1:], pieces[1:], strict=True):
            if learn and "<tool_call>" in piece:
                body = json.loads(piece.split("<tool_call>\n")[1].split("\n</tool_call>")[0])
                messages.append({"role": "assistant", "content": "", "tool_calls": [{"function": body}]})
            elif learn:
                messages.append(said(piece.removesuffix("<|im_end|>")))
            else:
                messages.append(replied(text.split("<result>")[1].split("</result>")[0]))
        whole = tokenizer.apply_chat_template(messages, chat_template=task.TEMPLATE, tokenize=False)
        assert whole == "".join(piece for piece, _ in pieces) + "\n"


def test_the_pages_have_the_committed_figures(bench):
    race, results = bench.race, json.loads(bench.race.RESULT.read_text())
    rows = results["rows"]
    assert between(race.PAGE, race.BEGIN, race.END) == race.text(rows)
    times = race.ratios(rows)
    assert len(times) >= 3 and all(row["plan"] == results["plan"] for row in rows if "plan" in row)
    factor = f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"
    assert f" | {factor} | `benchmarks/race.py` |" in (ROOT / "README.md").read_text()
