"""Training on the conversations that a run logged: the run's own first step, and what cannot be replayed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.trainers import Answered, Calls, Letters, conversation, trainer_builder

from mt_grpo.errors import ConfigError
from mt_grpo.runlog import open_run, read_trajectories

UNLIKE = ("step_time", "epoch")
"""What differs in a line of metrics: an epoch of a replay is all that was logged."""
REWARDS = ((Calls(),), (Answered(),))


def weights(trainer) -> list[torch.Tensor]:
    return [each.detach().clone() for each in trainer.model.parameters()]


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in UNLIKE} for line in lines if "loss" in line]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, a, b))


@pytest.fixture
def run(build, tmp_path):
    """A finished run of two steps, and its weights."""
    trainer = build(output_dir=str(tmp_path / "run"))
    trainer.train()
    return tmp_path / "run", weights(trainer)


@pytest.fixture
def replay(build, tmp_path):
    """Makes a trainer that replays the run, without a script to sample from."""

    def make(**options):
        given = {"output_dir": str(tmp_path / "again"), "replay": str(tmp_path / "run"), **options}
        return build(None, **given)

    return make


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2, "num_iterations": 2},
        {"loss_type": "grpo", "groups_without_signal": "leave_out", "per_device_train_batch_size": 8},
    ],
    ids=["plain", "several batches", "groups left out"],
)
def test_every_step_of_an_unchanged_replay_is_the_runs(build, replay, tmp_path, options):
    """Its weights go through the same steps, so each batch is what the run trained on, bit for bit."""
    options = {"rewards": ((), (Letters(),)), "max_completion_length": 60, **options}
    trainer = build(None, output_dir=str(tmp_path / "run"), **options)
    trainer.train()
    again = replay(**options)
    again.train()
    assert same(weights(trainer), weights(again))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "again")
    logged, trained = (
        [{**each, "start": None} for each in read_trajectories(tmp_path / name)] for name in ("run", "again")
    )
    assert logged == trained


def test_batches_come_as_they_were_sampled_in_later_epochs(tmp_path, tokenizer, questions):
    """Three batches per epoch, two per step: the third step begins with the second half of an accumulation."""
    build = trainer_builder(tmp_path, tokenizer, questions.select(range(3)))
    options = {"rewards": ((), (Letters(),)), "max_turn_length": 12, "temperature": 1.0, "steps_per_generation": 1}
    build(None, output_dir=str(tmp_path / "run"), gradient_accumulation_steps=2, max_steps=3, **options).train()
    build(None, output_dir=str(tmp_path / "again"), replay=str(tmp_path / "run"), max_steps=5, **options).train()
    sampled, replayed = ([row["sampled"] for row in open_run(tmp_path / name).rows] for name in ("run", "again"))
    assert len(set(sampled)) == 20 and replayed == sampled


def test_smaller_micro_batches_train_on_the_same_batch(build, replay, tmp_path):
    """What a limit of memory asks for: half the rows at a time."""
    trainer = build(per_device_train_batch_size=8, output_dir=str(tmp_path / "run"))
    trainer.train()
    again = replay(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    again.train()
    whole, halves = metrics(tmp_path / "run")[0], metrics(tmp_path / "again")[0]
    for name in ("loss", "grad_norm", "reward", "entropy", "turn_1/advantage"):
        assert halves[name] == pytest.approx(whole[name], rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [{"use_vllm": True}, {"history": "strip_thinking"}],
    ids=["corrected for an engine", "rewritten histories"],
)
def test_what_an_engine_sampled_is_trained_as_it_was(build, replay, tmp_path, options):
    """Scripted: its log-probs are not the model's, and rewritten histories are trees that fork."""

    def script(session, turn):
        return f"<think>well</think>{conversation(session, turn)}"

    trainer = build(script, output_dir=str(tmp_path / "run"), **options)
    trainer.train()
    again = replay(**options)
    again.train()
    assert same(weights(trainer), weights(again))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "again")
    assert (metrics(tmp_path / "run")[0]["sequences/mean"] > 1) == ("history" in options)


def test_a_run_that_sampled_ahead_is_replayed_without_waiting(build, replay, tmp_path):
    """With its correction for earlier weights."""
    trainer = build(output_dir=str(tmp_path / "run"), max_staleness=1, max_steps=3)
    trainer.train()
    again = replay(max_staleness=1, max_steps=3)
    again.train()
    assert same(weights(trainer), weights(again))
    run, replayed = metrics(tmp_path / "run"), metrics(tmp_path / "again")
    assert [line["loss"] for line in run] == [line["loss"] for line in replayed]


def test_a_replay_takes_the_smaller_steps_of_its_run(build, replay, tmp_path, monkeypatch):
    monkeypatch.setattr("mt_grpo.training.trainer.effective_sample_size", lambda output: 0.1)
    trainer = build(output_dir=str(tmp_path / "run"), max_staleness=1)
    trainer.train()
    again = replay(max_staleness=1)
    again.train()
    assert same(weights(trainer), weights(again))
    assert not any(name.startswith("staleness/") for line in metrics(tmp_path / "again") for name in line)


def test_another_rule_is_credited_on_the_logged_scores(run, replay, tmp_path):
    folder, before = run
    trainer = replay(advantage_estimator="grpo_or", loss_type="grpo")
    trainer.train()
    assert not same(before, weights(trainer))
    assert [row["reward"] for row in open_run(tmp_path / "again").rows] == [
        row["reward"] for row in open_run(folder).rows
    ]
    assert open_run(tmp_path / "again").about["estimator"] == "grpo_or"


def test_a_replay_goes_on_from_a_checkpoint_of_the_run(build, replay, tmp_path):
    options = {"output_dir": str(tmp_path / "run"), "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    trainer = build(**options)
    trainer.train()
    again = replay(max_steps=3)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert same(weights(trainer), weights(again))
    assert metrics(tmp_path / "run")[2:] == metrics(tmp_path / "again")


def test_no_server_is_asked_for_and_nothing_is_evaluated(run, replay):
    trainer = replay(use_vllm=True, vllm_server_port=1, do_eval=True, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert trainer.weight_sync is None and trainer.eval_trajectories == []
    assert "eval_loss" not in trainer.state.log_history


def test_steps_that_are_unset_are_those_that_were_logged(run, replay):
    trainer = replay(max_steps=-1, num_train_epochs=3)
    trainer.train()
    assert trainer.state.global_step == 2


def test_prompts_are_those_of_the_conversations(run, replay, questions):
    trainer = replay()
    trainer.train()
    asked = [words[-1]["content"] for words in trainer._logs["prompt"]]
    assert asked == [each.prompt[-1]["content"] for each in trainer.batch.trajectories]


def test_an_evaluation_of_a_replay_is_refused(run, replay, questions):
    with pytest.raises(ConfigError, match="`replay` trains on what a run logged, and samples nothing"):
        replay().evaluate(questions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replay": "/no/such/run"}, "`replay: /no/such/run` cannot be replayed. There is no folder /no/such/run"),
        ({"max_steps": 3}, "has 2 whole batches, and `max_steps: 3` takes 3: set `max_steps` to 2 at most"),
        ({"num_generations": 2}, "has 4 conversations for each prompt, and `num_generations` is 2"),
        ({"per_device_train_batch_size": 8}, r"sampled 4 conversations at a time, and these options take 8"),
        ({"rewards": ((), (Letters(),))}, "has no scores of the reward 'Letters': it has those of Calls, Answered"),
        ({"output_dir": "run"}, "is the run that is replayed: give another `--output_dir`"),
    ],
)
def test_what_does_not_fit_the_run_is_refused(run, replay, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        replay(**options)


def test_a_run_that_has_not_trained_is_refused(build, replay, tmp_path):
    build(output_dir=str(tmp_path / "run")).evaluate()
    with pytest.raises(ConfigError, match="has no whole batch that was sampled to train on"):
        replay()


def test_a_run_of_another_tokenizer_is_refused(run, replay):
    file = run[0] / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    index = run[0] / "rollouts" / "index.jsonl"  # as if the run had written it
    lines = [line for line in index.read_text().splitlines() if '"tokenizer/tokenizer.json"' not in line]
    index.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match="has another tokenizer than"):
        replay()


def test_tokens_that_the_model_lacks_are_refused(run, replay):
    trainer = replay()
    trainer.model.config.get_text_config().vocab_size = 5
    with pytest.raises(ConfigError, match=r"has the token \d+, and the model knows 5"):
        trainer.train()


def test_a_damaged_record_is_refused_in_a_sentence(run, replay):
    (run[0] / "rollouts" / "train-1-0.rank0.parquet").write_bytes(b"damaged")
    trainer = replay()
    with pytest.raises(ConfigError, match=r"train-1-0.rank0.parquet is damaged \(its bytes are others"):
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize(
    "scores",
    [
        {"turn": {"Calls": []}, "outcome": {"Answered": 1.0}},
        {"turn": {"Calls": [1.0] * 2}, "outcome": {"Answered": "1.0"}},
        {"turn": {"Calls": [1.0] * 2}, "outcome": {"Answered": float("nan")}},
        {"turn": {"Calls": 1.0}, "outcome": {"Answered": 1.0}},
    ],
    ids=["too few turns", "text", "nan", "no list"],
)
def test_damaged_scores_are_refused_in_a_sentence(run, replay, scores):
    path = run[0] / "rollouts" / "train-0-0.rank0.parquet"
    table = pq.read_table(path)
    records = [json.dumps({**json.loads(text), "rewards": scores}) for text in table["record"].to_pylist()]
    place = table.schema.get_field_index("record")
    pq.write_table(table.set_column(place, "record", pa.array(records)), path, row_group_size=16)
    index = path.with_name("index.jsonl")
    lines = [line.partition(',"crc":')[0] for line in index.read_text().splitlines() if '"kind":"file"' not in line]
    index.write_text("".join(f"{line}}}\n" for line in lines))  # without checksums
    with pytest.raises(ConfigError, match=r"is damaged: its score of the (turn|outcome) reward"):
        replay().train()


def test_a_run_without_a_group_size_is_refused(run, replay):
    index = run[0] / "rollouts" / "index.jsonl"
    index.write_text("\n".join(line for line in index.read_text().splitlines() if '"kind":"run"' not in line) + "\n")
    with pytest.raises(ConfigError, match="does not say how many conversations it has for each prompt"):
        replay()


def test_a_run_without_sampled_log_probs_is_refused(build, replay, tmp_path, monkeypatch):
    trainer = build(output_dir=str(tmp_path / "run"))
    generate = trainer.runner.engine.generate

    async def without(*args, **kwargs):
        sample = await generate(*args, **kwargs)
        sample.logprobs = [math.nan] * len(sample.ids)
        return sample

    monkeypatch.setattr(trainer.runner.engine, "generate", without)
    trainer.train()
    with pytest.raises(ConfigError, match="lacks log-probs of sampled tokens"):
        replay().train()


def test_an_unfinished_batch_is_not_replayed(run, replay):
    """A run that is ended while it samples leaves the conversations that were finished."""
    index = run[0] / "rollouts" / "index.jsonl"
    lines = index.read_text().splitlines()
    last = next(line for line in reversed(lines) if '"kind":"rollout"' in line)
    index.write_text("\n".join(line for line in lines if line is not last) + "\n")
    with pytest.raises(ConfigError, match="has 1 whole batches"):
        replay()
    trainer = replay(max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1
