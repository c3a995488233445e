"""Training on the conversations that a run logged: the run's own first step, and what cannot be replayed."""

import json
import math
from pathlib import Path
from shutil import copytree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.trainers import LETTERS, logged, same, thinking, trainer_builder, weights

from mt_grpo.errors import ConfigError
from mt_grpo.runlog import open_run, read_trajectories

UNLIKE = ("step_time", "epoch")
"""What differs in a line of metrics: an epoch of a replay is all that was logged."""
SAMPLED = {"script": None, "rewards": LETTERS, "max_completion_length": 60}


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in UNLIKE} for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tokenizer, questions):
    """A finished run of two steps, and its weights."""
    folder = tmp_path_factory.mktemp("finished")
    (trainer := trainer_builder(folder, tokenizer, questions)()).train()
    return folder, weights(trainer)


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return copytree(finished[0], tmp_path / "run")


@pytest.fixture
def replay(build, tmp_path):
    """Makes a trainer that replays the run, without a script to sample from."""

    def make(**options):
        given = {"output_dir": str(tmp_path / "again"), "replay": str(tmp_path / "run"), **options}
        return build(**{**given, "script": None})

    return make


@pytest.fixture
def both(build, replay, tmp_path):
    """A run with some options, and its replay: they have the same weights after every step, so each batch is equal."""

    def make(**options):
        (trainer := build(**options, output_dir=str(tmp_path / "run"))).train()
        (again := replay(**options)).train()
        assert same(weights(trainer), weights(again))
        return metrics(tmp_path / "run"), metrics(tmp_path / "again")

    return make


@pytest.mark.parametrize(
    "options",
    [
        SAMPLED,
        SAMPLED | {"gradient_accumulation_steps": 2, "num_iterations": 2},
        SAMPLED | {"loss_type": "grpo", "groups_without_signal": "leave_out", "per_device_train_batch_size": 8},
        # of an engine: its log-probs are not the model's, and rewritten histories are trees that fork
        {"script": thinking, "use_vllm": True},
        {"script": thinking, "history": "strip_thinking"},
    ],
    ids=["plain", "several batches", "groups left out", "corrected for an engine", "rewritten histories"],
)
def test_every_step_of_an_unchanged_replay_is_the_runs(both, tmp_path, options):
    ran, replayed = both(**options)
    assert ran == replayed and (ran[0]["sequences/mean"] > 1) == ("history" in options)
    found = [[{**each, "start": None} for each in read_trajectories(tmp_path / name)] for name in ("run", "again")]
    assert found[0] == found[1]


def test_batches_come_as_they_were_sampled_in_later_epochs(tmp_path, tokenizer, questions):
    """Three batches per epoch, two per step: the third step begins with the second half of an accumulation."""
    build = trainer_builder(tmp_path, tokenizer, questions.select(range(3)))
    options = {**SAMPLED, "max_turn_length": 12, "temperature": 1.0, "steps_per_generation": 1}
    build(output_dir=str(tmp_path / "run"), gradient_accumulation_steps=2, max_steps=3, **options).train()
    build(output_dir=str(tmp_path / "again"), replay=str(tmp_path / "run"), max_steps=5, **options).train()
    sampled, replayed = ([row["sampled"] for row in open_run(tmp_path / name).rows] for name in ("run", "again"))
    assert len(set(sampled)) == 20 and replayed == sampled


def test_smaller_micro_batches_train_on_the_same_batch(build, replay, tmp_path):
    """What a limit of memory asks for: half the rows at a time."""
    (trainer := build(per_device_train_batch_size=8, output_dir=str(tmp_path / "run"))).train()
    (again := replay(per_device_train_batch_size=4, gradient_accumulation_steps=2)).train()
    names = ("loss", "grad_norm", "reward", "entropy", "turn_1/advantage")
    assert logged(again, *names)[0] == pytest.approx(logged(trainer, *names)[0], rel=1e-4)


def test_a_run_that_sampled_ahead_is_replayed_without_waiting(both, monkeypatch):
    """With its correction for earlier weights, and its smaller steps."""
    monkeypatch.setattr("mt_grpo.training.trainer.effective_sample_size", lambda output: 0.1)
    run, replayed = both(max_staleness=1, max_steps=3)
    assert [line["loss"] for line in run] == [line["loss"] for line in replayed]
    assert not any(name.startswith("staleness/") for line in replayed for name in line)


def test_a_run_that_a_teacher_alone_taught_is_replayed(both):
    run, replayed = both(
        rewards=((), ()), teacher={"model": "self", "sees": ["answer"]}, distillation_coef=1.0, max_steps=2
    )
    assert [line["loss"] for line in run] == [line["loss"] for line in replayed]


def test_another_rule_is_credited_on_the_logged_scores(finished, run, replay, tmp_path):
    (trainer := replay(advantage_estimator="grpo_or", loss_type="grpo")).train()
    again = open_run(tmp_path / "again")
    assert not same(finished[1], weights(trainer)) and again.about["estimator"] == "grpo_or"
    assert again.column("reward").tolist() == open_run(run).column("reward").tolist()


def test_a_replay_goes_on_from_a_checkpoint_of_the_run(build, replay, tmp_path):
    options = {"output_dir": str(tmp_path / "run"), "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    (trainer := build(**options)).train()
    (again := replay(max_steps=3)).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert same(weights(trainer), weights(again))
    assert metrics(tmp_path / "run")[2:] == metrics(tmp_path / "again")


def test_no_server_is_asked_for_and_nothing_is_evaluated(run, replay, questions):
    options = {"do_eval": True, "eval_strategy": "steps", "eval_steps": 1, "max_steps": -1, "num_train_epochs": 3}
    (trainer := replay(use_vllm=True, vllm_server_port=1, **options)).train()
    assert trainer.state.global_step == 2  # steps that are unset are those that were logged
    assert trainer.weight_sync is None and trainer.eval_trajectories == []
    assert "eval_loss" not in trainer.state.log_history
    asked = [words[-1]["content"] for words in trainer._logs["prompt"]]
    assert asked == [each.prompt[-1]["content"] for each in trainer.batch.trajectories]
    with pytest.raises(ConfigError, match="`replay` trains on what a run logged, and samples nothing"):
        trainer.evaluate(questions)


# What cannot be replayed


def keep_lines(run: Path, keeps) -> None:
    """Leaves some lines of the index, as if the run had written no others."""
    index = run / "rollouts" / "index.jsonl"
    index.write_text("".join(f"{line}\n" for line in index.read_text().splitlines() if keeps(line)))


def other_tokenizer(run: Path) -> None:
    file = run / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    keep_lines(run, lambda line: '"tokenizer/tokenizer.json"' not in line)


def no_group_size(run: Path) -> None:
    keep_lines(run, lambda line: '"kind":"run"' not in line)


def unfinished(run: Path) -> None:
    """Without the last of its conversations, as when it was ended while it sampled."""
    index = (run / "rollouts" / "index.jsonl").read_text().splitlines()
    last = next(line for line in reversed(index) if '"kind":"rollout"' in line)
    keep_lines(run, lambda line: line != last)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (None, {"replay": "/no/such"}, "`replay: /no/such` cannot be replayed. There is no folder /no/such"),
        (None, {"max_steps": 3}, "has 2 whole batches, and `max_steps: 3` takes 3: set `max_steps` to 2 at most"),
        (None, {"num_generations": 2}, "has 4 conversations for each prompt, and `num_generations` is 2"),
        (None, {"per_device_train_batch_size": 8}, "sampled 4 conversations at a time, and these options take 8"),
        (None, {"rewards": LETTERS}, "has no scores of the reward 'Letters': it has those of Calls, Ans"),
        (None, {"output_dir": "run"}, "is the run that is replayed: give another `--output_dir`"),
        (other_tokenizer, {}, "has another tokenizer than"),
        (no_group_size, {}, "does not say how many conversations it has for each prompt"),
        (unfinished, {}, "has 1 whole batches"),
    ],
)
def test_what_does_not_fit_the_run_is_refused(run, replay, tmp_path, monkeypatch, change, options, message):
    monkeypatch.chdir(tmp_path)
    if change is not None:
        change(run)
    with pytest.raises(ConfigError, match=message):
        replay(**options)
    if change is unfinished:
        (trainer := replay(max_steps=1)).train()
        assert trainer.state.global_step == 1


def test_a_run_that_has_not_trained_is_refused(build, replay, tmp_path):
    build(output_dir=str(tmp_path / "run")).evaluate()
    with pytest.raises(ConfigError, match="has no whole batch that was sampled to train on"):
        replay()


def test_tokens_that_the_model_lacks_are_refused(run, replay):
    trainer = replay()
    trainer.model.config.get_text_config().vocab_size = 5
    with pytest.raises(ConfigError, match=r"has the token \d+, and the model knows 5"):
        trainer.train()


def test_a_damaged_record_is_refused_in_a_sentence(run, replay):
    (run / "rollouts" / "train-1-0.rank0.parquet").write_bytes(b"damaged")
    trainer = replay()
    with pytest.raises(ConfigError, match=r"train-1-0.rank0.parquet is damaged \(its bytes are others"):
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize(
    ("turns", "outcome"),
    [([], 1.0), ([1.0] * 2, "1.0"), ([1.0] * 2, float("nan")), (1.0, 1.0)],
    ids=["too few turns", "text", "nan", "no list"],
)
def test_damaged_scores_are_refused_in_a_sentence(run, replay, turns, outcome):
    path = run / "rollouts" / "train-0-0.rank0.parquet"
    scores = {"turn": {"Calls": turns}, "outcome": {"Answered": outcome}}
    table = pq.read_table(path)
    records = [json.dumps({**json.loads(text), "rewards": scores}) for text in table["record"].to_pylist()]
    place = table.schema.get_field_index("record")
    pq.write_table(table.set_column(place, "record", pa.array(records)), path, row_group_size=16)
    index = path.with_name("index.jsonl")
    lines = [line.partition(',"crc":')[0] for line in index.read_text().splitlines() if '"kind":"file"' not in line]
    index.write_text("".join(f"{line}}}\n" for line in lines))  # without checksums
    with pytest.raises(ConfigError, match=r"is damaged(: its score of the (turn|outcome) reward| \()"):
        replay().train()


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
