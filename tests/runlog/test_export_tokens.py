"""Token ids and pairs are what was sampled, and TRL's trainers train on them."""

from __future__ import annotations

import http.client
import json
import urllib.request
from pathlib import Path

import pytest
from support.browser import serving
from support.credited_runs import Member, write_credited
from support.runs import EMBEDDED, REWARDS, _copy_tokenizer, write_run
from tokenizers.processors import TemplateProcessing

from mt_grpo.cli import main
from mt_grpo.errors import UserError
from mt_grpo.runlog import Batch, RunWriter, open_run
from mt_grpo.runlog.export import lines
from mt_grpo.trajectory import StopReason, Trajectory, Turn
from mt_grpo.viewer.queries import Queries

DOCS = Path(__file__).parents[2] / "docs" / "records.md"


def documented(name: str):
    """A function of docs/records.md."""
    namespace: dict = {}
    (block,) = [each for each in DOCS.read_text().split("```python\n") if f"def {name}(" in each]
    exec(block.split("```")[0], namespace)
    return namespace[name]


def exported(run, form: str) -> list[dict]:
    return [json.loads(line) for line in lines(run, form, run.rows)]


def write(folder: Path, *made: Trajectory, stops: tuple = (), prompt: tuple = (5, 6)) -> Path:
    """A run of one group; a conversation without a tree gets a turn of its number's token."""
    for number, each in enumerate(made):
        if not each.turns:
            each.tree.add_turn(list(prompt), [10 + number, 20], [-0.1, -0.1])
            each.turns = [Turn(0, {"role": "assistant", "content": "x"}, num_tokens=2)]
        each.stop_reason = stops[number] if stops else StopReason.ANSWERED
        each.rewards = each.rewards or {"outcome": {"exact_match": float(number)}}
    writer, batch = RunWriter(folder), Batch("train", 0, 0, len(made), list(range(len(made))), list(made), REWARDS)
    writer.append([*writer.save_tokenizer(_copy_tokenizer), {"kind": "run", "version": 1}, *writer.write(batch)])
    return folder


def made(*turns: tuple[list[int], list[int]], reward: float = 0.0, mask: list[int] | None = None) -> Trajectory:
    """A conversation of contexts and actions."""
    trajectory = Trajectory([{"role": "user", "content": "?"}], rewards={"outcome": {"exact_match": reward}})
    for index, (context, action) in enumerate(turns):
        trajectory.tree.add_turn(context, action, [-0.5] * len(action))
        turn = Turn(index, {"role": "assistant", "content": "x"}, num_tokens=len(action), mask=mask)
        trajectory.turns.append(turn)
    return trajectory


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
    for row, _, tree in run.trees(run.rows):
        trained = [
            token
            for line in found[row["session"]]
            for token, mask in zip(line["input_ids"], line["assistant_masks"], strict=True)
            if mask
        ]
        assert sorted(trained) == sorted(token for action in tree.actions() for token in action)
        assert {len(each) for each in found.values()} == {each[0]["sequences"] for each in found.values()}


def test_tokens_taken_out_of_training_are_not_trained(tmp_path):
    run = open_run(write(tmp_path, made(([5, 6], [7, 8]), ([5, 6, 7, 8, 9], [10, 11]), mask=[0, 1])))
    (line,) = exported(run, "tokens")
    assert line["input_ids"] == [5, 6, 7, 8, 9, 10, 11] and line["assistant_masks"] == [0, 0, 0, 1, 0, 0, 1]


def test_pairs_part_where_the_samples_do(tmp_path):
    same = ([5, 6], [7, 8])
    best = made(same, ([5, 6, 7, 8, 9], [10]), ([5, 6, 7, 8, 9, 10, 12], [13]), reward=1.0)
    worst = made(same, ([5, 6, 7, 8, 9], [11]))
    middle = [made(same, ([5, 6, 7, 8, 99], [11]), reward=0.6), made(([5, 6], [8]), reward=0.4)]
    run = open_run(write(tmp_path, middle[0], worst, best, middle[1]))
    first, second = exported(run, "preferences")
    assert (first["prompt_tokens"], first["turn"], first["score_chosen"], first["score_rejected"]) == (
        [5, 6, 7, 8, 9],
        1,
        1.0,
        0.0,
    )
    assert (first["chosen_tokens"], first["chosen_mask"]) == ([10, 12, 13], [1, 0, 1])
    assert (first["rejected_tokens"], first["rejected_mask"]) == ([11], [1])
    assert first["chosen"] == run.tokenizer.decode([10, 12, 13], skip_special_tokens=False)
    assert (second["prompt_tokens"], second["chosen_tokens"], second["rejected_tokens"]) == (
        [5, 6],
        [7, 8, 99, 11],
        [8],
    )
    assert first["chosen_session"].endswith("2") and second["group"] == "train-0-0-0"


def test_a_side_ends_where_its_history_was_rewritten(tmp_path):
    rewritten = made(([5, 6], [7, 8]), ([5, 6, 8, 9], [10]), reward=1.0)
    run = open_run(write(tmp_path, rewritten, made(([5, 6], [11]))))
    (pair,) = exported(run, "preferences")
    assert (pair["chosen_tokens"], pair["rejected_tokens"]) == ([7, 8], [11])


@pytest.mark.parametrize(
    "group",
    [
        [made(([5], [7]), reward=1.0)],
        [made(([5], [7]), reward=1.0), made(([5], [8]), reward=1.0)],
        [made(([5], [7]), reward=1.0), made(([6], [8]))],
        [made(([5], [7]), reward=1.0), made(([5], [7]))],
        [made(([5], [7]), ([5, 7, 9], [8]), reward=1.0), made(([5], [7]))],
        [made(([5], [7]), reward=1.0, mask=[0]), made(([5], [8]))],
    ],
    ids=["alone", "equal rewards", "other prompts", "same tokens", "one goes on", "out of training"],
)
def test_no_pair_is_said_in_a_sentence(tmp_path, capsys, group):
    folder = write(tmp_path / "run", *group)
    assert main(["export", str(folder), "--to", "preferences"]) == 1
    assert "There is no pair: it takes two conversations" in capsys.readouterr().err
    assert not (folder / "preferences.jsonl").exists()


def test_failed_conversations_and_copies_are_in_no_pair(tmp_path):
    stops = (StopReason.ENV_ERROR, StopReason.ANSWERED, StopReason.ANSWERED, StopReason.ENGINE_ERROR)
    run = open_run(write(tmp_path / "failed", *(Trajectory([]) for _ in range(4)), stops=stops))
    (pair,) = exported(run, "preferences")
    assert (pair["chosen_session"][-1], pair["rejected_session"][-1]) == ("2", "1")
    turns = [[0.2, 0.0]]
    group = [Member([0.0, 0.1], turns, [False]), Member([1.0, 0.1], turns), Member([2.0, 0.1], turns, None, 0, 1)]
    branched = open_run(write_credited(tmp_path / "branched", [group], "grpo_or"))
    (pair,) = exported(branched, "preferences")
    assert (pair["chosen_session"][-1], pair["rejected_session"][-1]) == ("1", "0")


def test_branches_and_copies_are_marked_in_every_form(tmp_path):
    turns = [[0.2, 0.0], [None, None]]
    group = [Member([1.0, 0.1], turns), Member([0.0, 0.1], turns, None, 0, 1), Member([1.0, 0.1], turns, None, 0, 2)]
    run = open_run(write_credited(tmp_path / "run", [group], "grpo_or"))
    root = run.rows[0]["session"]
    for form in ("messages", "sharegpt", "tokens", "jsonl"):
        marks = [(line["branch_of"], line["shared_turns"], line["copy"]) for line in exported(run, form)]
        assert marks == [(None, 0, False), (root, 1, False), (root, 2, True)], form
    path = tmp_path / "once.jsonl"
    assert main(["export", str(tmp_path / "run"), "--to", "tokens", "--filter", "copy=0", "--output", str(path)]) == 0
    assert len(path.read_text().splitlines()) == 2
    assert main(["export", str(tmp_path / "run"), "--to", "dataset", "--output", str(tmp_path / "data")]) == 0


@pytest.mark.parametrize("form", ["tokens", "preferences"])
def test_a_conversation_with_an_image_is_named(tmp_path, capsys, form):
    folder = write(tmp_path / "run", made(([5, -3, -3], [7]), reward=1.0), made(([5, -3, -3], [8])))
    assert main(["export", str(folder), "--to", form]) == 1
    said = capsys.readouterr().err
    assert "train-000000-000000-000000 has an image or a sound" in said and said.count("\n") == 1


def test_what_a_tokenizer_puts_first_is_not_there_twice(tmp_path):
    run = open_run(write(tmp_path, Trajectory([]), Trajectory([]), prompt=(5, 300, 301)))
    post = TemplateProcessing(single="<b> $A", special_tokens=[("<b>", 5)])
    run.tokenizer.post_processor = post
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
    (pair,) = exported(open_run(write(tmp_path, one, made(([5, 6], [11])))), "preferences")
    batch = {name: values.tolist() for name, values in documented("as_sampled")([pair]).items()}
    assert batch["input_ids"] == [[5, 6, 7, 8, 9, 10], [5, 6, 11, 0, 0, 0]]
    assert batch["completion_mask"] == [[0, 0, 1, 1, 0, 1], [0, 0, 1, 0, 0, 0]]
    assert batch["attention_mask"] == [[1] * 6, [1, 1, 1, 0, 0, 0]]


@pytest.mark.slow
def test_trl_trains_on_tokens_and_on_pairs(folder, tmp_path):
    from datasets import load_dataset
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    files = {form: str(tmp_path / f"{form}.jsonl") for form in ("tokens", "preferences")}
    for form, file in files.items():
        assert main(["export", str(folder), "--to", form, "--filter", "mode=train", "--output", file]) == 0
    model, once = str(EMBEDDED.parent), {"max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True}
    options = {**once, "output_dir": str(tmp_path / "out"), "report_to": [], "save_strategy": "no", "bf16": False}
    documented("imitate")(model, files["tokens"], **options)
    documented("prefer")(model, files["preferences"], **options)
    rows = load_dataset("json", data_files=files["tokens"], split="train")
    trainer = SFTTrainer(model, args=SFTConfig(max_length=None, **options), train_dataset=rows)
    for line, taken in zip(rows, trainer.train_dataset, strict=True):
        masked = zip(line["input_ids"], line["assistant_masks"], strict=True)
        assert taken["labels"] == [token if mask else -100 for token, mask in masked]
    rows = load_dataset("json", data_files=files["preferences"], split="train")
    DPOTrainer(model, args=DPOConfig(max_length=None, **options), train_dataset=rows).train()  # as it is


def test_a_download_that_cannot_go_on_is_not_whole(tmp_path, capsys):
    folder = write(tmp_path / "run", made(([5], [7])), made(([5, -3], [8])))
    with serving(Queries(open_run(folder))) as server, urllib.request.urlopen(f"{server.url}export/tokens") as answer:
        assert "input_ids" in json.loads(answer.readline())
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
    said = capsys.readouterr().err
    assert "tokens.jsonl" in said and "has an image or a sound" in said and "Traceback" not in said


def test_the_page_gives_tokens_and_pairs(folder):
    with serving(Queries(open_run(folder))) as server:
        for form, column in (("tokens", "input_ids"), ("preferences", "chosen_mask")):
            with urllib.request.urlopen(f"{server.url}export/{form}?q=mode%3Dtrain") as answer:
                assert column in json.loads(answer.readline())
