"""What is exported for training renders and tokenizes as what the model saw, and TRL's trainers train on it."""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.request
from pathlib import Path

import pytest
from datasets import load_dataset
from support.browser import serving
from support.credited_runs import Member, write_credited
from support.runs import EMBEDDED, copy_tokenizer, queries_of, talk, write_conversations, write_run
from support.template_matrix import look, sampled, tokenizer_of
from tokenizers.processors import TemplateProcessing

from mt_grpo.cli import main
from mt_grpo.envs import MultiTurnToolEnv, Outcome
from mt_grpo.errors import UserError
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.runlog import Run, open_run
from mt_grpo.runlog.export import lines
from mt_grpo.trajectory import StopReason, Trajectory

FAMILIES = ("qwen3", "qwen3_5_think", "qwen3_8", "glm4moe", "gemma4", "gptoss", "lfm2_2_5", "llama3_1", "muse_glimmer")
CALLS_AS_TEXT = ("llama3", "lfm2", "qwen2_5_vl")
OTHER_PAST = [("gemma4", "two calls, thinking"), ("llama3_1", "two calls, thinking")]
"""The page on templates says `kept`: they write the past in another way."""


def documented(name: str):
    """A function of docs/records.md."""
    page, namespace = (Path(__file__).parents[2] / "docs" / "records.md").read_text(), {}
    (block,) = [each for each in page.split("```")[1::2] if f"def {name}(" in each]
    exec(block.removeprefix("python\n"), namespace)
    return namespace[name]


def exported(run, form: str) -> list[dict]:
    return [json.loads(line) for line in lines(run, form, run.rows)]


# Messages


def written(folder: Path, trajectory: Trajectory, tokenizer, **about):
    """A run of one conversation."""
    trajectory.rewards = {"outcome": {"exact_match": 1.0}, "turn": {"tool_execution": [0.2] * len(trajectory.turns)}}
    return open_run(write_conversations(folder, [trajectory], tokenizer.save_pretrained, **about))


def check(line: dict, context: str, tokenizer) -> None:
    """What the model saw before its last message is what the messages before it render as, letter for letter."""
    *before, last = line["messages"]
    rendered = documented("rendered")
    asked = {**line, "messages": before, "chat_template_kwargs": {"add_generation_prompt": True}}
    assert rendered(asked, tokenizer) == context
    assert last["content"] in rendered({**line, "chat_template_kwargs": {}}, tokenizer)


@pytest.mark.parametrize(
    ("family", "scenario"),
    [
        *((family, scenario) for family in FAMILIES for scenario in ("one call", "two calls, thinking")),
        *((family, "two calls") for family in CALLS_AS_TEXT),
    ],
)
def test_messages_render_as_what_was_seen(family, scenario, tmp_path):
    (trajectory, engine), tokenizer = sampled(family, scenario, "keep"), tokenizer_of(family)
    (line,) = exported(written(tmp_path, trajectory, tokenizer), "messages")
    if family in FAMILIES:
        calls = [call for message in line["messages"] for call in message.get("tool_calls", ())]
        assert all(isinstance(call["function"]["arguments"], dict) for call in calls) and len(calls) >= 3
        assert [tool["function"]["name"] for tool in line["tools"]] == ["look", "find"]
    if (family, scenario) not in OTHER_PAST:
        check(line, tokenizer.decode(engine.requests[-1][1]), tokenizer)


def test_other_forms_have_the_same_messages(tmp_path):
    trajectory, _ = sampled("qwen3", "two calls, thinking", "keep")
    run = written(tmp_path / "run", trajectory, tokenizer_of("qwen3"))
    (line,), (turns,), (trace,) = (exported(run, form) for form in ("messages", "sharegpt", "openinference"))
    who = [entry["from"] for entry in turns["conversations"]]
    assert who == ["human", *["function_call", "observation"] * 3, "gpt"]
    assert json.loads(turns["conversations"][1]["value"].split("</think>")[-1])[1]["name"] == "find"
    assert [tool["name"] for tool in json.loads(turns["tools"])] == ["look", "find"]
    asked = {"key": "llm.input_messages.0.message.content", "value": {"stringValue": line["messages"][0]["content"]}}
    text = json.dumps(trace)
    assert text.count(json.dumps(asked)) == 1  # a trace grows with its turns
    for reply in (reply for turn in trajectory.turns[:-1] for reply in turn.replies):
        assert text.count(json.dumps({"stringValue": reply["content"]})) == 2  # told to the model, and the call's
    assert main(["export", str(tmp_path / "run"), "--to", "dataset", "--output", str(tmp_path / "set")]) == 0
    (example,) = load_dataset(str(tmp_path / "set"), cache_dir=str(tmp_path / "cache"))["train"]
    assert example["prompt"] + example["completion"] == line["messages"] and example["tools"] == line["tools"]
    assert [message["role"] for message in example["prompt"]] == ["user"]
    about = example["session"], example["group"], example["weights"]["tool_execution"]
    assert about == ("train-000000-000000-000000", "train-0-0-0", 0.5)


class Agent:
    """Asks, asks a sub-agent with a tool of its own in between, goes on, and begins anew with a summary."""

    async def run(self, policy, row) -> Outcome:
        tools = MultiTurnToolEnv([look], "", 9, "native").tool_schemas
        system = {"role": "system", "content": "Main."}
        messages = [system, {"role": "user", "name": "ann", "content": "Plan."}]
        messages += [(await policy.reply(messages)).message, {"role": "user", "content": "Go on."}]
        await policy.reply([{"role": "user", "content": "Look."}], tools)
        messages.append((await policy.reply(messages)).message)
        await policy.reply([system, {"role": "user", "content": "Summary."}])
        return Outcome({}, None)

    async def close(self) -> None:
        pass


def test_each_way_through_an_agent_renders_as_what_was_seen(tmp_path):
    tokenizer = tokenizer_of("qwen2_5")
    engine = ScriptedEngine(tokenizer, lambda session, turn: f"Said {turn}.<|im_end|>")
    (trajectory,) = asyncio.run(RolloutRunner(Agent, engine).run([RolloutRequest("Plan.", "0")], SamplingParams()))
    assert trajectory.error is None, trajectory.error
    run = written(tmp_path, trajectory, tokenizer)
    found = exported(run, "messages")
    assert [(line["sequence"], line["sequences"]) for line in found] == [(0, 3), (1, 3), (2, 3)]
    assert [line["advantages"] for line in found] == [[0.5], [0.5, 0.5], [0.5]]
    for line, (_, seen, _) in zip(found, engine.requests[1:], strict=True):
        check(line, tokenizer.decode(seen), tokenizer)
    assert "tools" in found[0] and "tools" not in found[1] and found[1]["messages"][1]["name"] == "ann"
    (trace,) = exported(run, "openinference")
    (spans,) = (scope["spans"] for scope in trace["resourceSpans"][0]["scopeSpans"])
    attributes = [{each["key"]: each["value"] for each in span["attributes"]} for span in spans[1:]]
    parents = [each.get("graph.node.parent_id", {}).get("stringValue") for each in attributes]
    assert parents == [None, None, "turn 1", None]  # the turn that a fork goes on from
    given = [sum(key.endswith("message.role") and "input" in key for key in each) for each in attributes]
    assert given == [2, 1, 1, 2]


def test_a_filter_chooses_as_on_the_page(tmp_path):
    trajectory, _ = sampled("qwen3", "one call", "keep")
    written(tmp_path / "run", trajectory, tokenizer_of("qwen3"), chat_template_kwargs={"enable_thinking": False})
    path, command = tmp_path / "file", ["export", str(tmp_path / "run"), "--to", "messages", "--filter"]
    assert main([*command, "mode=train right=1 tool_execution>0.5", "--output", str(path)]) == 0
    assert json.loads(path.read_text())["chat_template_kwargs"] == {"enable_thinking": False}
    assert main([*command, "right=0"]) == 1


# Token ids and pairs


def made(*turns: tuple[list[int], list[int]], reward: float = 0.0, mask: list[int] | None = None) -> Trajectory:
    """A conversation of contexts and actions."""
    trajectory = talk(*((*turn, "x") for turn in turns), rewards={"outcome": {"exact_match": reward}})
    for turn in trajectory.turns:
        turn.mask = mask
    return trajectory


def group(folder: Path, *conversations: Trajectory):
    return open_run(write_conversations(folder, list(conversations), copy_tokenizer))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "run")


def test_each_sampled_token_is_trained_in_one_line(folder):
    run = open_run(folder)
    found: dict = {}
    for line in exported(run, "tokens"):
        assert len(line["input_ids"]) == len(line["assistant_masks"])
        found.setdefault(line["session"], []).append(line)
    assert any(len(each) > 1 for each in found.values())  # a rewritten history
    assert all(len(each) == each[0]["sequences"] for each in found.values())
    for row, _, tree in run.trees(run.rows):
        pairs = [zip(line["input_ids"], line["assistant_masks"], strict=True) for line in found[row["session"]]]
        trained = [token for line in pairs for token, mask in line if mask]
        assert sorted(trained) == sorted(token for action in tree.actions() for token in action)


def test_tokens_taken_out_of_training_are_not_trained(tmp_path):
    run = group(tmp_path, made(([5, 6], [7, 8]), ([5, 6, 7, 8, 9], [10, 11]), mask=[0, 1]))
    (line,) = exported(run, "tokens")
    assert (line["input_ids"], line["assistant_masks"]) == ([5, 6, 7, 8, 9, 10, 11], [0, 0, 0, 1, 0, 0, 1])


def test_pairs_part_where_the_samples_do(tmp_path):
    same, second = ([5, 6], [7, 8]), [5, 6, 7, 8, 9]
    best = made(same, (second, [10]), ([*second, 10, 12], [13]), reward=1.0)
    worst, middle = made(same, (second, [11])), made(same, ([5, 6, 7, 8, 99], [11]), reward=0.6)
    run = group(tmp_path, middle, worst, best, made(([5, 6], [8]), reward=0.4))
    first, other = exported(run, "preferences")
    assert (
        first.items()
        >= {
            **{"prompt_tokens": second, "turn": 1, "score_chosen": 1.0, "score_rejected": 0.0},
            **{"chosen_tokens": [10, 12, 13], "chosen_mask": [1, 0, 1], "rejected_tokens": [11], "rejected_mask": [1]},
            "chosen": run.tokenizer.decode([10, 12, 13], skip_special_tokens=False),
            "chosen_session": "train-000000-000000-000002",
        }.items()
    )
    tokens = {"prompt_tokens": [5, 6], "chosen_tokens": [7, 8, 99, 11], "rejected_tokens": [8]}
    assert other.items() >= {**tokens, "group": "train-0-0-0"}.items()


def test_a_side_ends_where_its_history_was_rewritten(tmp_path):
    rewritten = made(([5, 6], [7, 8]), ([5, 6, 8, 9], [10]), reward=1.0)
    (pair,) = exported(group(tmp_path, rewritten, made(([5, 6], [11]))), "preferences")
    assert (pair["chosen_tokens"], pair["rejected_tokens"]) == ([7, 8], [11])


BEST = made(([5], [7]), reward=1.0)


@pytest.mark.parametrize(
    "conversations",
    [
        [BEST],
        [BEST, made(([5], [8]), reward=1.0)],
        [BEST, made(([6], [8]))],
        [BEST, made(([5], [7]))],
        [made(([5], [7]), ([5, 7, 9], [8]), reward=1.0), made(([5], [7]))],
        [made(([5], [7]), reward=1.0, mask=[0]), made(([5], [8]))],
    ],
    ids=["alone", "equal rewards", "other prompts", "same tokens", "one goes on", "out of training"],
)
def test_no_pair_is_said_in_a_sentence(tmp_path, capsys, conversations):
    group(tmp_path / "run", *conversations)
    assert main(["export", str(tmp_path / "run"), "--to", "preferences"]) == 1
    assert "There is no pair: it takes two conversations" in capsys.readouterr().err
    assert not (tmp_path / "run" / "preferences.jsonl").exists()


def test_failed_conversations_and_copies_are_in_no_pair(tmp_path):
    four = [made(([5, 6], [10 + number, 20]), reward=float(number)) for number in range(4)]
    four[0].stop_reason, four[3].stop_reason = StopReason.ENV_ERROR, StopReason.ENGINE_ERROR
    turns = [[0.2, 0.0]]
    members = [Member([0.0, 0.1], turns, [False]), Member([1.0, 0.1], turns), Member([2.0, 0.1], turns, None, 0, 1)]
    branched = open_run(write_credited(tmp_path / "branched", [members], "grpo_or"))
    for run, best, worst in ((group(tmp_path / "failed", *four), "2", "1"), (branched, "1", "0")):
        (pair,) = exported(run, "preferences")
        assert (pair["chosen_session"][-1], pair["rejected_session"][-1]) == (best, worst)


def test_branches_and_copies_are_marked_in_every_form(tmp_path):
    turns = [[0.2, 0.0], [None, None]]
    members = [Member([1.0, 0.1], turns), Member([0.0, 0.1], turns, None, 0, 1), Member([1.0, 0.1], turns, None, 0, 2)]
    run = open_run(write_credited(tmp_path / "run", [members], "grpo_or"))
    root = run.rows[0]["session"]
    for form in ("messages", "sharegpt", "tokens", "jsonl"):
        marks = [(line["branch_of"], line["shared_turns"], line["copy"]) for line in exported(run, form)]
        assert marks == [(None, 0, False), (root, 1, False), (root, 2, True)], form
    path, command = tmp_path / "once.jsonl", ["export", str(tmp_path / "run"), "--to"]
    assert main([*command, "tokens", "--filter", "copy=0", "--output", str(path)]) == 0
    assert len(path.read_text().splitlines()) == 2
    assert main([*command, "dataset", "--output", str(tmp_path / "data")]) == 0


def test_conversations_with_an_image_are_left_out_and_counted(tmp_path, capsys):
    seen, other = made(([5, -3, -3], [7]), reward=2.0), made(([5], [9]))
    folder = group(tmp_path / "run", made(([5], [7]), reward=1.0), seen, other).folder
    assert main(["export", str(folder), "--to", "tokens"]) == main(["export", str(folder), "--to", "preferences"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("2 sequences (1 conversation left out: an image or a sound has no token ids of its own")
    assert said[1].startswith("1 pair in ")
    assert {line["session"][-1] for line in exported(open_run(folder), "tokens")} == {"0", "2"}
    (pair,) = exported(open_run(folder), "preferences")
    assert (pair["chosen_session"][-1], pair["rejected_session"][-1]) == ("0", "2")


@pytest.mark.parametrize("form", ["tokens", "preferences"])
def test_conversations_that_all_have_images_are_refused(tmp_path, capsys, form):
    group(tmp_path / "run", made(([5, -3, -3], [7]), reward=1.0), made(([5, -3, -3], [8])))
    assert main(["export", str(tmp_path / "run"), "--to", form]) == 1
    said = capsys.readouterr().err
    assert ("no token ids of its own" in said or "without images or sounds" in said) and said.count("\n") == 1


def test_what_a_tokenizer_puts_first_is_not_there_twice(tmp_path):
    run = group(tmp_path, *(made(([5, 300, 301], [number, 20]), reward=float(number)) for number in (10, 11)))
    run.tokenizer.post_processor = TemplateProcessing(single="<b> $A", special_tokens=[("<b>", 5)])
    (pair,) = exported(run, "preferences")
    assert run.tokenizer.encode(pair["prompt"]).ids == pair["prompt_tokens"] == [5, 300, 301]


def test_pairs_without_a_tokenizer_are_refused(folder):
    run = open_run(folder)
    run.__dict__["tokenizer"] = None
    with pytest.raises(UserError, match="has no tokenizer, so that pairs have no text: export `tokens`"):
        exported(run, "preferences")
    assert exported(run, "tokens")


def test_the_documented_collator_has_the_sampled_tokens_alone(tmp_path):
    one = made(([5, 6], [7, 8]), ([5, 6, 7, 8, 9], [10]), reward=1.0)
    (pair,) = exported(group(tmp_path, one, made(([5, 6], [11]))), "preferences")
    batch = {name: values.tolist() for name, values in documented("as_sampled")([pair]).items()}
    assert batch["input_ids"] == [[5, 6, 7, 8, 9, 10], [5, 6, 11, 0, 0, 0]]
    assert batch["completion_mask"] == [[0, 0, 1, 1, 0, 1], [0, 0, 1, 0, 0, 0]]
    assert batch["attention_mask"] == [[1] * 6, [1, 1, 1, 0, 0, 0]]


@pytest.mark.slow
def test_trl_trains_on_tokens_and_on_pairs(folder, tmp_path):
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    files = {form: str(tmp_path / f"{form}.jsonl") for form in ("tokens", "preferences")}
    for form, file in files.items():
        assert main(["export", str(folder), "--to", form, "--filter", "mode=train", "--output", file]) == 0
    tokens, pairs = (load_dataset("json", data_files=file, split="train") for file in files.values())
    model, once = str(EMBEDDED.parent), {"max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True}
    options = {**once, "output_dir": str(tmp_path / "out"), "report_to": [], "save_strategy": "no", "bf16": False}
    documented("imitate")(model, files["tokens"], **options)
    documented("prefer")(model, files["preferences"], **options)
    trainer = SFTTrainer(model, args=SFTConfig(max_length=None, **options), train_dataset=tokens)
    for line, taken in zip(tokens, trainer.train_dataset, strict=True):
        masked = zip(line["input_ids"], line["assistant_masks"], strict=True)
        assert taken["labels"] == [token if mask else -100 for token, mask in masked]
    DPOTrainer(model, args=DPOConfig(max_length=None, **options), train_dataset=pairs).train()  # as it is


def test_the_page_gives_what_is_whole(folder):
    with serving(queries_of(folder)) as server:
        for form, column in (("tokens", "input_ids"), ("preferences", "chosen_mask")):
            with urllib.request.urlopen(f"{server.url}export/{form}?q=mode%3Dtrain") as answer:
                assert column in json.loads(answer.readline())


def test_the_page_says_why_it_gives_nothing_more(tmp_path, capsys, monkeypatch):
    run, trees = group(tmp_path / "run", made(([5], [7])), made(([5], [8]))), Run.trees

    def damaged(self, rows):
        yield next(iter(trees(self, rows)))
        raise UserError("The second is damaged.")

    monkeypatch.setattr(Run, "trees", damaged)
    with serving(queries_of(run.folder)) as server, urllib.request.urlopen(f"{server.url}export/tokens") as answer:
        assert "input_ids" in json.loads(answer.readline())
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
    said = capsys.readouterr().err
    assert "tokens.jsonl" in said and "The second is damaged." in said and "Traceback" not in said
