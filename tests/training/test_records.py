"""What a trainer leaves of its conversations: credit, what it computed per token, and where the time went."""

import json
import signal
import time
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace

import pytest
import torch
from support.forked import Forked
from support.trainers import (
    LETTERS,
    Answered,
    Calls,
    Letters,
    Never,
    Same,
    Share,
    audited,
    batch,
    same,
    trainer_builder,
    weights,
)
from transformers.integrations import TensorBoardCallback

from mt_grpo.credit import estimate
from mt_grpo.runlog import RunLogError, open_run
from mt_grpo.runlog.files import read_state
from mt_grpo.runlog.writer import RunWriter
from mt_grpo.token_tree import TokenTree
from mt_grpo.training.checkpoint import latest_checkpoint
from mt_grpo.training.preflight import left_by_runs
from mt_grpo.training.step_log import Outputs, _NumbersToTensorBoard
from mt_grpo.training.step_log import records as recorder
from mt_grpo.training.step_log.records import _number_rows, _split_number, _update_rows, mean_record, read_audit
from mt_grpo.trajectory import Trajectory

SAVES = {"save_strategy": "steps", "save_steps": 1}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def passes(tmp_path_factory, tokenizer, questions):
    """Two batches, each trained in two passes, of what the model itself sampled."""
    build = trainer_builder(folder := tmp_path_factory.mktemp("passes"), tokenizer, questions)
    options = {"max_steps": 4, "num_iterations": 2, "max_turn_length": 12, "epsilon": 0.02}
    trainer, start = build(None, rewards=LETTERS, **options), time.time()
    trainer.train()
    return open_run(folder), start, time.time()


@pytest.fixture(scope="module")
def scripted(tmp_path_factory, tokenizer, questions):
    """One batch of scripted conversations, and its trainer."""
    build = trainer_builder(folder := tmp_path_factory.mktemp("scripted"), tokenizer, questions)
    (trainer := build(reward_weights=[3.0, 0.5], max_steps=1)).train()
    return open_run(folder), trainer


def test_every_update_of_a_conversation_is_kept(passes, tokenizer):
    run, *_ = passes
    state = read_state(run.folder)
    assert (state["state"], state["step"], state["of"], state["under_way"]) == ("finished", 4, 4, [])
    assert run.about["versions"].keys() >= {"trl", "torch"} and run.about["options"]["num_iterations"] == 2
    assert [row["step"] for row in run.rows] == [0] * 4 + [2] * 4
    for row in run.rows:
        assert [update["step"] for update in row["updates"]] == [row["step"], row["step"] + 1]
        whole = run.trajectory(row["session"])
        tokens, (first, second) = whole["tokens"], (update["ratios"] for update in whole["updates"])
        sampled = [place for place, turn in enumerate(tokens["turn"]) if turn >= 0]
        assert [place for place, ratio in enumerate(first) if ratio is not None] == sampled
        assert all(first[place] == pytest.approx(1, abs=2e-3) for place in sampled)
        assert any(abs(second[place] - 1) > 0.01 for place in sampled) or not any(row["advantages"])
        # the trainer computes what its engine sampled
        assert tokenizer.decode(tokens["ids"]).startswith("".join(tokens["texts"]))  # may end in half a character
        pairs = [pair for pair in zip(tokens["trainer"], tokens["logprobs"], strict=True) if None not in pair]
        assert len(pairs) == len(sampled) == sum(row["tokens"])
        assert max(abs(trainer - engine) for trainer, engine in pairs) < 1e-3 and row["mismatch"] < 1e-3


def test_clips_and_entropies_of_tokens_are_those_of_the_loss(passes):
    run, *_ = passes
    logged = [line for line in run.metrics() if "loss" in line]
    updates = [update for row in run.rows for update in run.trajectory(row["session"])["updates"]]
    for step, line in enumerate(logged):
        of_step = [update["clipped"] for update in updates if update["step"] == step]
        flags = [flag for clipped in of_step for flag in clipped if flag is not None]
        assert sum(flags) / len(flags) == pytest.approx(line["clip_ratio/region_mean"], abs=1e-6)
    assert any(line["clip_ratio/region_mean"] for line in logged)
    for row in run.rows:
        assert row["entropy"] == pytest.approx(logged[row["step"]]["entropy"], rel=0.3)


def test_times_are_absolute_and_parts_of_a_step_add_up(passes):
    run, start, end = passes
    assert [line["step"] for line in run.steps()] == [0, 1, 2, 3]
    for line in run.steps():
        parts = [line[name] for name in ("sampling", "rewards", "sync", "training")]
        assert sum(parts) == pytest.approx(line["seconds"], abs=1e-3) and min(parts) >= 0
        assert start - 1 <= line["start"] <= end
    assert run.steps()[0]["sampling"] > 0 and run.steps()[1]["sampling"] == 0  # the second pass samples nothing
    for row in run.rows:
        assert start - 1 <= row["start"] <= run.trajectory(row["session"])["turns"][0]["start"] <= end


def test_the_parts_of_each_advantage_are_kept_with_the_rule(build, tmp_path):
    rule = {"name": "turn_gae", "lam": 0.5}
    build(max_steps=1, advantage_estimator=rule, turn_advantage_coef=2.0, scale_rewards="batch").train()
    run = open_run(tmp_path)
    assert run.about["estimator"] == rule
    assert run.about["rule"] == {**rule, "turn_coef": 2.0, "gamma": 1.0, "scale_rewards": "batch"}
    assert run.about["rule_says"].startswith("Generalised advantage estimation over turns")
    turns = [turn for row in run.rows for turn in run.trajectory(row["session"])["turns"]]
    assert any(turn["advantage"] for turn in turns)
    for turn in turns:
        parts = {part["name"]: part for part in turn["parts"]}
        assert list(parts) == ["outcome", "turn reward Calls", "later values", "baseline"]
        assert sum(part["value"] for part in parts.values()) == pytest.approx(turn["advantage"], abs=1e-6)
        assert len({part["scale"] for part in parts.values()}) == 1
    first = run.trajectory(run.rows[0]["session"])
    earned = first["turns"][0]["parts"][1]
    wanted = sum(value * 0.5**turn for turn, value in enumerate(first["rewards"]["turn"]["Calls"]) if value)
    assert earned["value"] * earned["scale"] == pytest.approx(2.0 * first["weights"]["Calls"] * wanted)


def test_credit_and_weights_are_those_that_are_trained(scripted):
    run, trainer = scripted
    rewards, first = trainer.batch.rewards, run.trajectory(run.rows[0]["session"])
    expected = estimate("mt_grpo", rewards, turn_coef=1.0, scale_rewards="group")
    for row, wanted in zip(run.rows, expected, strict=True):
        assert row["advantages"] == pytest.approx(wanted[: row["turns"]].tolist(), abs=1e-5)
    totals = rewards.outcome_rewards + rewards.turn_rewards.nansum(dim=1)
    assert run.column("reward") == pytest.approx(totals.tolist(), abs=1e-6)
    named = {reward["name"]: reward["weight"] for reward in run.about["rewards"]}
    assert named == first["weights"] == {"Calls": 3.0, "Answered": 0.5}
    assert [(row["group"], row["member"]) for row in run.rows] == [(0, member) for member in range(4)]
    assert first["turns"][0]["tool_calls"][0]["start"] >= first["turns"][0]["start"]


def test_an_exported_trajectory_is_the_one_that_was_sampled(scripted):
    run, trainer = scripted
    for made, data in zip(trainer.batch.trajectories, run.trajectories(), strict=True):
        data = {name: value for name, value in data.items() if name not in ("step", "mode")}
        assert list(data) == list(made.to_dict())
        read = Trajectory.from_dict(data)
        for node, other in zip(read.tree.nodes, made.tree.nodes, strict=True):
            assert node.tokens == other.tokens and node.logprobs == pytest.approx(other.logprobs, rel=1e-6)
        read.tree = made.tree = TokenTree()
        made.environment = None
        assert read == made


def test_evaluations_of_a_step_stay_apart(build, tmp_path, questions):
    trainer = build(per_device_eval_batch_size=4)
    for _ in range(2):
        trainer.evaluate(questions.select(range(1)))
    rows = [(row["mode"], row["k"], row["advantages"] is None) for row in open_run(tmp_path).rows]
    assert rows == [("eval", k, False) for k in (0, 1) for _ in range(4)]


def test_a_sequence_level_ratio_clips_whole_conversations(build):
    trainer = build(importance_sampling_level="sequence", epsilon=0.1, advantage_estimator="grpo_or")
    inputs = batch(trainer)
    logps = torch.zeros(inputs["completion_ids"].shape)
    inputs["old_per_token_logps"] = logps - 1.0
    rows, summaries = _update_rows([Outputs.of(inputs, logps, logps, trainer.args)])
    for row, summary, advantages in zip(rows, summaries, inputs["advantages"], strict=True):
        assert len(set(row["clipped"].tolist())) == 1
        positive = advantages[torch.tensor(row["columns"], dtype=torch.long)] > 0
        assert summary["clipped"] == pytest.approx(positive.float().mean().item())


@pytest.mark.parametrize("delta", [None, 0.7, 1.1, 2.0])
def test_clipped_is_what_has_no_gradient(delta):
    args = SimpleNamespace(loss_type="grpo", importance_sampling_level="token", epsilon=0.2, epsilon_high=0.3)
    args.delta, advantages = delta, torch.tensor([-1.0, 1.0]).repeat(20)
    ratios = torch.linspace(0.4, 2.6, 40, requires_grad=True)
    whole = ratios if delta is None else ratios.clamp(max=delta)
    torch.min(whole * advantages, ratios.clamp(0.8, 1.3) * advantages).sum().backward()
    assert (recorder._clip_flags(ratios.log(), advantages, None, args) == (ratios.grad == 0)).all()


def test_row_numbers_name_conversations():
    numbers = _number_rows(70_000, 65_000, torch.tensor([0, 9_000_000])).tolist()
    assert list(map(_split_number, numbers)) == [(70_000, 65_000, 0), (70_000, 65_000, 9_000_000)]


def test_a_folder_that_cannot_be_written_ends_a_run(build, tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunLogError, match=r"metrics\.jsonl cannot be written \(Is a directory\): free space or mend"):
        build(max_steps=1).train()
    (trainer := build()).step_log.records.writer = RunWriter("/dev/null")
    with pytest.raises(RunLogError, match="The run's conversations cannot be written to /dev/null/rollouts"):
        trainer.train()


def test_a_failure_after_scoring_loses_no_conversation(build, tmp_path, monkeypatch):
    def fail(*arguments):
        raise MemoryError("full")

    monkeypatch.setattr("mt_grpo.training.rollout_batch.token_columns", fail)
    with pytest.raises(MemoryError):
        build(max_steps=1).train()
    rows = open_run(tmp_path).rows
    assert [(row["stop"], row["reward"] is None) for row in rows] == [("answered", False)] * 4


# The audit of rewards


def test_a_run_records_what_its_rewards_tell_apart(build, tmp_path):
    rewards = ((Calls(), Share(), Never()), (Letters(), Same()))
    build(rewards=rewards, advantage_estimator="reward_to_go", logging_steps=2, max_steps=3).train()
    first, last = lines(tmp_path / "audit.jsonl")
    assert (first["step"], first["groups"], last["step"], last["groups"]) == (2, 2, 3, 1)
    found = last["rewards"]
    causal = {"Calls": True, "Share": False, "Never": True, "Letters": None, "Same": None}
    assert [(name, each["causal"]) for name, each in found.items()] == list(causal.items())
    assert found["Letters"]["group_correlation"] == pytest.approx(1) and found["Share"]["group_variance"] == 0.0
    assert found["Never"]["applies"] == 0.0 and found["Same"]["equal_groups"] == 1.0
    logged = lines(tmp_path / "metrics.jsonl")[0]
    names = {"groups_without_signal", "sign_agreement", "uncredited_at_turn", "uncredited_up_to_turn"}
    assert {name.removeprefix("credit/") for name in logged if name.startswith("credit/")} == names


def test_means_are_over_the_records_that_have_a_number():
    records = [audited(silent=silent, a={"mean": silent or None}) for silent in (0.0, 0.5, 1.0)]
    for each, value in zip(records, [True, None, False], strict=True):
        each["rewards"]["a"]["causal"] = value
    mean = mean_record(records)
    assert (mean["groups"], mean["groups_without_signal"], mean["sign_agreement"]) == (6, 0.5, None)
    assert mean["rewards"]["a"]["mean"] == 0.75 and mean["rewards"]["a"]["causal"] is False
    assert mean_record(records[:2])["rewards"]["a"]["causal"] is True


def test_of_a_step_that_was_taken_again_the_last_record_counts(tmp_path):
    assert read_audit(tmp_path) is None
    written = [{"step": step, **audited(silent=silent, a={})} for step, silent in ((1, 0.0), (2, 1.0), (2, 0.5))]
    whole = "".join(json.dumps(line) + "\n" for line in written)
    others = [whole[: len(whole) // 4], "[]", "{}", '{"step": 1, "rewards": []}']  # one is of a run that was killed
    (tmp_path / "audit.jsonl").write_text("\n".join([*others, whole]))
    audit = read_audit(tmp_path)
    assert (audit["groups_without_signal"], audit["groups"]) == (0.25, 4) and "step" not in audit


# A run that was killed anywhere leaves, once it is resumed, the records of one that was not

OPTIONS = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, "lr_scheduler_type": "constant"}
OPTIONS |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8, "num_generations_eval": 1}

KILLED = f"""
import os, signal, sys
from pathlib import Path
from datasets import Dataset
from support.models import build_tokenizer
from support.trainers import trainer_builder
from mt_grpo.runlog import writer
from mt_grpo.training import resuming
from mt_grpo.training.step_log.records import Records

folder, moment = Path(sys.argv[1]), sys.argv[2]
owner, name, when = {{
    # conversations and credit are written
    "trained": (Records, "update", lambda records, update: update.number == 2),
    "logged": (Records, "log", lambda records, logs, number: number == 4),
    "saving": (resuming, "save_rollouts", lambda folder, *rest: folder.name == "checkpoint-4"),
    "trimming": (writer, "_keep", lambda path, stays: path.name == "metrics.jsonl"),
}}[moment]
function = getattr(owner, name)

def killing(*arguments, **options):
    if when(*arguments):
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*arguments, **options)

setattr(owner, name, killing)
asked = [[{{"role": "user", "content": f"What is {{n}} of Peru"}}] for n in range(8)]
questions = Dataset.from_dict({{"prompt": asked, "answer": [[f"Lima {{n}}"] for n in range(8)]}})
build = trainer_builder(folder, build_tokenizer(), questions)
build(**{OPTIONS!r}).train(resume_from_checkpoint=True if moment == "trimming" else None)
"""


def records(folder: Path) -> tuple:
    """All that does not depend on time; nothing is written twice."""
    run = open_run(folder)
    rows = [{k: v for k, v in row.items() if "seconds" not in k and k != "start"} for row in run.rows]
    slow = ("_per_second", "runtime", "step_time")
    metrics = [{k: v for k, v in line.items() if not k.endswith(slow)} for line in run.metrics()]
    files = sorted(path.name for path in (folder / "rollouts").iterdir())
    written = lines(folder / "rollouts" / "index.jsonl")
    kinds = [tuple(line.get(key) for key in ("kind", "session", "step", "file")) for line in written]
    assert any(kind[0] == "run" for kind in kinds)
    kinds = [kind for kind in kinds if kind[0] != "run" and kind[3] != "tokenizer/tokenizer.json"]
    assert len(kinds) == len(set(kinds))
    return rows, [line["step"] for line in run.steps()], metrics[:-1], lines(folder / "audit.jsonl"), files


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tokenizer, questions):
    (trainer := trainer_builder(folder := tmp_path_factory.mktemp("whole"), tokenizer, questions)(**OPTIONS)).train()
    return records(folder), weights(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("moments", [["trained"], ["logged"], ["saving", "trimming"]], ids="-".join)
def test_a_killed_run_leaves_the_records_of_a_whole_one(moments, whole, build, tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    for moment in moments:
        run = Forked([str(tmp_path / "killed.py"), str(tmp_path / "run"), moment], tmp_path / "log")
        assert run.wait(300) == -signal.SIGKILL, (tmp_path / "log").read_text()
    (trainer := build(output_dir=str(tmp_path / "run"), **OPTIONS)).train(resume_from_checkpoint=True)
    for ours, theirs in zip(records(tmp_path / "run"), whole[0], strict=True):
        assert ours == theirs
    assert same(weights(trainer), whole[1])


# Checkpoints


@pytest.fixture(scope="module")
def one_step(tmp_path_factory, tokenizer, questions) -> Path:
    folder = tmp_path_factory.mktemp("one_step")
    trainer_builder(folder, tokenizer, questions)(max_steps=1, **SAVES).train()
    return folder / "checkpoint-1"


def test_going_back_sets_later_checkpoints_aside(build, tmp_path, caplog):
    for resumed in (None, str(tmp_path / "checkpoint-1")):
        build(max_steps=3, **SAVES).train(resume_from_checkpoint=resumed)
    (said,) = [each.getMessage() for each in caplog.records if "goes on from step 1" in each.getMessage()]
    assert "the records of steps up to 3 were removed" in said
    assert "kept under other names (abandoned-checkpoint-2, abandoned-checkpoint-3)" in said
    run = open_run(tmp_path)
    assert [line["step"] for line in run.metrics() if "loss" in line] == [1, 2, 3]
    assert [row["step"] for row in run.rows] == [step for step in range(3) for _ in range(4)]
    assert [line["step"] for line in run.steps()] == [0, 1, 2]
    assert all(row["advantages"] is not None and len(row["updates"]) == 1 for row in run.rows)
    assert [line["kind"] for line in lines(tmp_path / "rollouts/index.jsonl")].count("run") == 2


def test_the_latest_checkpoint_is_of_the_run_that_went_back(build, tmp_path):
    build(max_steps=3, **SAVES).train()
    for _ in range(2):
        build(max_steps=2, **SAVES).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        assert latest_checkpoint(str(tmp_path)) == tmp_path / "checkpoint-2"
    aside = ["abandoned-checkpoint-2", "abandoned-checkpoint-2-2", "abandoned-checkpoint-3"]
    assert sorted(path.name for path in tmp_path.glob("abandoned-*")) == aside
    assert {path.name for path in left_by_runs(str(tmp_path))} >= {*aside}  # `--overwrite_output_dir` removes them
    build(max_steps=2, save_total_limit=3, **SAVES).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    left = ["abandoned-checkpoint-2-3", "checkpoint-1", "checkpoint-2"]
    assert sorted(path.name for path in tmp_path.glob("*checkpoint-*")) == left


def test_a_checkpoint_of_another_folder_trims_nothing(build, tmp_path, one_step):
    build(max_steps=3).train()
    build(max_steps=2).train(resume_from_checkpoint=str(one_step))
    assert len([line for line in open_run(tmp_path).metrics() if "loss" in line]) == 4


def test_other_rewards_of_a_checkpoint_are_named_once(build, one_step, tmp_path, caplog):
    def said(checkpoint, words="was made with other", **keys):
        caplog.clear()
        build(**keys).train(resume_from_checkpoint=str(checkpoint))
        return [record.getMessage() for record in caplog.records if words in record.getMessage()]

    other = {"rewards": ((Calls(),), (Answered(), Letters()))}
    (note,) = said(one_step, **other)
    assert "rewards: Calls (1), Answered (1); here Calls (1), Answered (1), Letters (1)" in note
    assert "data" not in note and "tools" not in note
    assert not said(one_step)
    silent = copytree(one_step, tmp_path / "checkpoint-1", dirs_exist_ok=True)
    (silent / "made_with.json").unlink()  # of a checkpoint that does not say
    assert not said(silent, **other) and not said(silent, "missing keys")


def test_tensorboard_is_sent_numbers_only(build, caplog):
    pytest.importorskip("tensorboard")
    trainer = build(max_steps=1, report_to=["tensorboard"])
    (callback,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, TensorBoardCallback)]
    assert type(callback) is _NumbersToTensorBoard
    callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    callback.on_log(trainer.args, trainer.state, trainer.control, logs={"reward": None, "loss": 1.0})
    assert "incorrect" not in caplog.text
