"""The race against TRL's trainer: both sides are given the same, and the page has the committed figures."""

from __future__ import annotations

import json
import statistics

import pytest
from support.servers import ROOT

BENCHMARKS = ROOT / "benchmarks"
ROW = {"answer": ["Lima"]}
PROMPT = [{"role": "user", "content": "What is the capital of Peru?"}]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


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
def test_trl_is_given_the_rewards_of_our_conversations(completion, rewards):
    from race_task import OUTCOME_REWARDS, TURN_REWARDS, in_trl

    from mt_grpo.rewards import load_rewards

    functions = [
        in_trl(each) for each in (*load_rewards(TURN_REWARDS, "turn"), *load_rewards(OUTCOME_REWARDS, "outcome"))
    ]
    columns = {name: [value] for name, value in ROW.items()}
    assert [each([PROMPT], [completion], trainer_state=None, **columns)[0] for each in functions] == rewards


def test_both_trainers_sample_from_the_same_prompt(tmp_path):
    from race import ARMS, Job, Plan, build
    from race_task import teach

    teach(tmp_path / "model", steps=1, size=1)
    plan = Plan(steps=1, batch=8)
    theirs, ours = (build(Job(arm, 1), plan, tmp_path / "model", str(tmp_path / arm)) for arm in list(ARMS)[:2])
    row = ours.train_dataset[0]
    (prompt,) = theirs._tokenize_prompts([row["prompt"]])[0]
    assert ours.runner.renderer.prompt_ids(ours.env.start(row["prompt"])) == prompt
    names = [
        "learning_rate",
        "beta",
        "loss_type",
        "num_generations",
        "max_steps",
        "temperature",
        "max_completion_length",
    ]
    assert [getattr(theirs.args, name) for name in names] == [getattr(ours.args, name) for name in names]
    assert theirs.reward_func_names == ours.reward_func_names


def test_the_taught_conversations_are_what_the_template_writes():
    import random

    from race_task import TEMPLATE, native
    from transformers import AutoTokenizer
    from warm_start_traces import make_trace

    from mt_grpo.data import embedded

    tokenizer = AutoTokenizer.from_pretrained(f"{embedded.__path__[0]}/model")
    draw = random.Random(3)
    for _ in range(20):
        trace = make_trace(draw, (1, 2), habits=False)
        pieces = native(trace)
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
        whole = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False)
        assert whole == "".join(piece for piece, _ in pieces) + "\n"


def test_the_pages_have_the_committed_figures():
    from race import BEGIN, END, PAGE, RESULT, ratios, text

    results = json.loads(RESULT.read_text())
    rows = results["rows"]
    assert PAGE.read_text().split(BEGIN)[1].split(END)[0].strip() == text(rows)
    times = ratios(rows)
    assert len(times) >= 3 and all(row["plan"] == results["plan"] for row in rows if "plan" in row)
    factor = f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"
    assert f" | {factor} | `benchmarks/race.py` |" in (ROOT / "README.md").read_text()
