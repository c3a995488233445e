"""The trainer on scripted and sampled rollouts."""

import asyncio
import json
from types import SimpleNamespace

import pytest
import torch
from support.models import build_model, lookup
from support.trainers import (
    LETTERS,
    SEARCH,
    Letters,
    batch,
    gradient,
    logged,
    member,
    same,
    trained_tokens,
    trainer_builder,
    weights,
)
from trl import GRPOConfig, GRPOTrainer

from mt_grpo.credit import estimate
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.envs.source import source_of
from mt_grpo.rollout import EngineError, RolloutError
from mt_grpo.runlog import open_run
from mt_grpo.training import ConfigError
from mt_grpo.training.checkpoint import load_rollouts, save_rollouts
from mt_grpo.training.environment import build_env
from mt_grpo.training.model import _REFERENCE, load_reference

SAMPLED = {"temperature": 1.0, "max_turn_length": 12, "learning_rate": 1e-3}


def test_sampled_tokens_are_trained_and_tool_results_are_seen(build, tokenizer):
    inputs = batch(trainer := build())
    requests = trainer.runner.engine.requests
    for row in range(4):
        real, trained = inputs["completion_mask"][row].bool(), trained_tokens(inputs)[row]
        sampled = [token for session, _, sample in requests if member(session) == row for token in sample.ids]
        assert inputs["completion_ids"][row][trained].tolist() == sampled
        whole = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist()
        whole += inputs["completion_ids"][row][real].tolist()  # the attention mask lets the model see all of it
        last = max((r for r in requests if member(r[0]) == row), key=lambda r: len(r[1]))
        assert whole == last[1] + last[2].ids
        assert row == 2 or "about Lima" in tokenizer.decode(inputs["completion_ids"][row][real & ~trained])


def test_each_token_gets_the_advantage_of_its_turn(build):
    def normal(rewards):
        return (rewards - rewards.mean()) / (rewards.std() + 1e-4)

    inputs = batch(trainer := build())
    outcomes, sums = trainer.batch.rewards.outcome_rewards, torch.tensor([2.0, 1.0, 0.0, 1.0])
    outcome, turn, merged = normal(outcomes), normal(sums), normal(outcomes + sums)
    expected = [  # turns up to the first result get the turn advantage too
        [outcome[0] + turn[0], outcome[0], outcome[0]],
        [outcome[1] + turn[1], outcome[1]],
        [merged[2]],
        [outcome[3] + turn[3], outcome[3] + turn[3], outcome[3]],
    ]
    for row, advantages in enumerate(expected):
        lengths = [turn.num_tokens for turn in trainer.batch.trajectories[row].turns]
        wanted = torch.cat([torch.full((n,), float(a)) for n, a in zip(lengths, advantages, strict=True)])
        torch.testing.assert_close(inputs["advantages"][row][trained_tokens(inputs)[row]], wanted)
    estimated = estimate("mt_grpo", trainer.batch.rewards, turn_coef=1.0)
    turns = trainer.batch.rewards.turn_mask
    shown = torch.tensor(list(trainer._logs["advantages"]))  # in TRL's table of completions
    torch.testing.assert_close(shown, (estimated * turns).sum(1) / turns.sum(1))


@pytest.mark.parametrize(
    "options",
    [
        {"num_iterations": 2},
        {"steps_per_generation": 2, "forward": "padded"},  # the tree forward deals whole groups to micro-batches
        {"loss_type": "grpo"},
    ],
)
@pytest.mark.slow
def test_with_one_turn_and_no_tools_it_is_trl_grpo(build, tokenizer, questions, options):
    def answer(number: int) -> str:
        return f"<answer>Lima {'of Peru ' * (number % 4)}</answer>"

    def rollout(prompts, trainer):
        ids = [tokenizer.encode(answer(number)) for number in range(len(prompts))]
        prompt_ids = [tokenizer.apply_chat_template(p, add_generation_prompt=True)["input_ids"] for p in prompts]
        logprobs = [[-(index + 1) / 100 for index in range(len(row))] for row in ids]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logprobs}

    def reward(completions, **kwargs):
        return [float(len(completion[0]["content"])) for completion in completions]

    options = {"max_steps": 3, "optim": "sgd", **options}
    ours = build(lambda session, turn: answer(member(session)), rewards=((), (reward,)), **options)
    names = "output_dir use_cpu bf16 gradient_checkpointing disable_tqdm per_device_train_batch_size num_generations "
    names += "max_completion_length learning_rate max_steps save_strategy logging_steps loss_type num_iterations optim"
    arguments = {name: getattr(ours.args, name) for name in names.split()}
    config = GRPOConfig(**arguments, report_to=[], steps_per_generation=options.get("steps_per_generation"))
    given = {"processing_class": tokenizer, "rollout_func": rollout}
    stock = GRPOTrainer(build_model(tokenizer), reward, config, questions, **given)
    learnt = []
    for trainer in (ours, stock):
        torch.manual_seed(0)
        trainer.train()
        learnt.append([torch.tensor(logged(trainer, "loss", "grad_norm")), *weights(trainer)])
    torch.testing.assert_close(*learnt, rtol=1e-5, atol=1e-7)


# Runs that go on


FOLLOWS = {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.7}


@pytest.mark.parametrize(
    "options",
    [
        FOLLOWS,
        {"steps_per_generation": 4, "num_iterations": 2},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
    ],
    ids=["a reference that follows", "a batch for several steps", "a step of several batches"],
)
@pytest.mark.slow
def test_a_resumed_run_takes_the_same_next_step(build, tmp_path, model, options):
    model.save_pretrained(tmp_path / "model")

    def run(folder, resume=None, **more):
        given = {"output_dir": str(tmp_path / folder), "max_steps": 5, **SAMPLED, **options, **more}
        (trainer := build(None, str(tmp_path / "model"), LETTERS, **given)).train(resume and str(tmp_path / resume))
        return trainer

    whole = run("whole")
    assert any(row.get("grad_norm") for row in whole.state.log_history)
    run("cut", save_strategy="steps", save_steps=3)
    resumed = run("cut", "cut/checkpoint-3")
    assert same(weights(whole), weights(resumed))
    if options is FOLLOWS:
        assert any(row.get("kl") for row in whole.state.log_history)
        assert all(map(torch.equal, whole.ref_model.parameters(), resumed.ref_model.parameters()))
        saved = tmp_path / "cut" / "checkpoint-3"
        assert [each.name for each in saved.glob("*.safetensors")] == ["model.safetensors"]  # vLLM reads all of these
        before = (saved / _REFERENCE).rename(saved / "reference.safetensors")  # its name in earlier checkpoints
        load_reference(saved, resumed.args, resumed.accelerator, resumed.ref_model)
        before.unlink()  # as where none is synced
        with pytest.raises(ConfigError, match="no synced reference"):
            run("cut", "cut/checkpoint-3")


@pytest.mark.parametrize("number", [2, 3], ids=["between epochs", "in the second epoch"])
def test_a_resumed_run_keeps_the_order_of_later_epochs(build, tmp_path, number):
    """Eight questions, four per step: an epoch is two steps."""
    options = {"per_device_train_batch_size": 8, "num_generations": 2, "max_steps": 6, "learning_rate": 0.0}

    def answered(**more):
        trainer = build(lambda session, turn: f"<answer>Lima {member(session)}</answer>", **options, **more)
        trainer.train(more.get("resume_from_checkpoint"))
        return [(row["step"], row["prompt"]) for row in open_run(tmp_path).rows]

    whole = answered(save_strategy="steps", save_steps=1)
    assert answered(resume_from_checkpoint=str(tmp_path / f"checkpoint-{number}")) == whole


@pytest.mark.slow
def test_a_step_that_was_cut_short_begins_again(tmp_path, tokenizer, questions):
    """Three batches per epoch, two per step: the third step begins with the fourth batch, and is cut in the fifth."""
    build = trainer_builder(tmp_path, tokenizer, questions.select(range(3)))

    def made(folder, reward=None):
        options = {"max_steps": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 1, **SAMPLED}
        return build(None, rewards=((), (reward or Letters(),)), output_dir=str(tmp_path / folder), **options)

    class Cut(Letters):
        def score(self, trajectory, **row):
            if trajectory.session.startswith("train-000002") and cut.accelerator.gradient_state.sync_gradients:
                raise KeyboardInterrupt
            return super().score(trajectory, **row)

    whole, cut, resumed = made("whole"), made("cut", Cut()), made("cut")
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    resumed.train(resume_from_checkpoint=str(cut.save_checkpoint()))
    assert same(weights(whole), weights(resumed))


def test_a_run_that_begins_anew_samples_anew(build):
    """What an interrupted run had sampled is not trained by the next one."""
    sessions = []
    options = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "num_iterations": 2, "max_steps": 3}
    trainer = build(lambda session, turn: sessions.append(session) or "<answer>Lima</answer>", **options)
    trainer._step, trainer._buffered_inputs = 3, [{}, {}]  # as if interrupted there
    trainer.train()
    assert trainer.state.global_step == 3 and len(sessions) == 8 and trainer._step == 3


def test_a_checkpoint_of_version_0_1_keeps_its_forks(tmp_path):
    one = SimpleNamespace(process_index=0, num_processes=1, device="cpu")
    forks = torch.tensor([[-1, 0, -1]])
    save_rollouts(tmp_path, one, 3, [{"parents": forks}], {})
    _, (loaded,), _ = load_rollouts(tmp_path, one, {"max_staleness": 0})
    assert loaded.keys() == {"parent"} and loaded["parent"].equal(forks)


# What is trained and measured


def test_metrics_are_logged_by_turn(build, tmp_path):
    build(max_steps=1).train()
    found = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    expected = {"turns/mean": (3 + 2 + 1 + 3) / 4, "stop/answered": 1.0, "rewards/Calls/mean": 4 / 3}
    expected |= {"tools/call_frequency": 4 / 4, "tools/failure_frequency": 0, "tools/malformed_frequency": 1 / 4}
    expected |= {"turn_1/malformed": 1 / 4, "turn_1/tool_calls": 2 / 4, "turn_1/failures": 0}
    expected |= {"turn_1/reward": 2 / 3, "turn_2/reward": 1.0}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert "turn_3/advantage" in found and "turn_3/reward" not in found


def test_truncated_completions_can_be_left_out_of_the_loss(build):
    inputs = batch(trainer := build(max_turn_length=20, mask_truncated_completions=True))
    truncated = [trajectory.stop_reason.value == "length" for trajectory in trainer.batch.trajectories]
    assert truncated == [True, True, False, True]
    assert trained_tokens(inputs).any(dim=1).tolist() == [False, False, True, False]
    assert inputs["completion_mask"].sum(dim=1).min() > 0


# Conversations that fail


def failing(members, turn_of_failure=1, answers=("Lima",) * 8):
    """Conversations of a search and an answer, of which some lose their engine before they sample a turn."""

    def script(session, turn):
        if member(session) in members and turn == turn_of_failure:
            return EngineError("the server is gone")
        return [SEARCH, f"<answer>{answers[member(session)]}</answer>"][turn]

    return script


UNLIKE = ("a", "bbbbbbb", "ccc", "ddddd")  # rewards 1.1, -, 1.3, 1.5; all turn rewards are equal
Z = 0.2 / (0.2 + 1e-4)  # the mean of those that did not fail is 1.3, their deviation 0.2


@pytest.mark.parametrize(
    ("script", "failed", "turns", "advantages"),
    [
        (failing({1}, 0), {1}, [2, 0, 2, 2], [0.0] * 4),
        (failing({1}, 1), {1}, [2, 1, 2, 2], [0.0] * 4),
        (failing({1}, 1, UNLIKE), {1}, [2, 1, 2, 2], [-Z, 0.0, 0.0, Z]),
        (failing({0, 1, 2}, 1, UNLIKE), {0, 1, 2}, [1, 1, 1, 2], [0.0] * 4),  # the one that is left
    ],
)
def test_failed_conversations_leave_loss_and_baseline(build, script, failed, turns, advantages):
    inputs = batch(trainer := build(script))
    found, rewards, trained = trainer.batch.trajectories, trainer.batch.rewards, trained_tokens(inputs)
    assert [len(trajectory.turns) for trajectory in found] == turns
    assert {row for row in range(4) if found[row].stop_reason.value == "engine_error"} == failed
    lost = [row in failed for row in range(4)]
    masks = rewards.outcome_rewards.isnan(), ~rewards.turn_mask.any(dim=1), ~trained.any(dim=1)
    assert [mask.tolist() for mask in masks] == [lost] * 3
    assert inputs["num_items_in_batch"] == trained.sum()
    for row, advantage in enumerate(advantages):
        ours = inputs["advantages"][row][inputs["completion_mask"][row].bool()]
        torch.testing.assert_close(ours, torch.full_like(ours, advantage), rtol=1e-4, atol=1e-6)
    assert torch.isfinite(trainer._compute_loss(trainer.model, inputs))


def test_failures_are_counted_and_leave_the_means_of_rewards(build):
    (trainer := build(failing({1, 2}), max_steps=1)).train()
    names = ["rollouts/failed", "rewards/Answered/mean", "rewards/Calls/mean", "frac_reward_zero_std"]
    assert logged(trainer, *names) == [[0.5, pytest.approx(1.4), 1.0, 1.0]]


@pytest.mark.parametrize("fault", ["start", "step"])
def test_an_environment_that_raises_leaves_loss_and_baseline_too(build, fault):
    class Broken(MultiTurnToolEnv):
        started = 0

        def start(self, prompt):
            Broken.started += 1
            if fault == "start" and Broken.started == 3:
                raise ConnectionError("no container")
            return super().start(prompt)

        async def step(self, turn):
            if fault == "step" and self.session.endswith("2") and turn.index == 1:
                raise ZeroDivisionError("by the user")
            return await super().step(turn)

    trainer = build(failing(set()), env=Broken([lookup], protocol="learnt_tags", max_steps=3))
    inputs = batch(trainer)
    assert [trajectory.stop_reason.value for trajectory in trainer.batch.trajectories].count("env_error") == 1
    assert not inputs["advantages"].any() and not trained_tokens(inputs)[2].any()
    assert torch.isfinite(trainer._compute_loss(trainer.model, inputs))


def test_a_timeout_after_a_turn_is_the_policys_doing(build):
    class Slow(MultiTurnToolEnv):
        async def step(self, turn):
            await asyncio.Event().wait()

    batch(trainer := build(failing(set()), env=Slow([lookup], protocol="learnt_tags"), rollout_timeout=1.0))
    found = trainer.batch.trajectories
    assert {trajectory.stop_reason.value for trajectory in found} == {"timeout"}
    assert trainer.batch.rewards.outcome_rewards.isnan().tolist() == [not trajectory.turns for trajectory in found]


def test_rewards_skip_failures_and_extra_columns_fit(build):
    seen = []

    def words(completions, log_extra, **kwargs):
        texts = [completion[-1]["content"] for completion in completions]
        seen.append(len(texts))
        log_extra("text", texts)
        return [float(len(text)) for text in texts]

    batch(trainer := build(failing({1}, 0), rewards=((), (words,))))
    assert seen == [3] and [bool(text) for text in trainer._logs["extra"]["text"]] == [True, False, True, True]
    assert trainer.batch.trajectories[1].rewards == {"outcome": {"words": None}, "turn": {}}


@pytest.mark.parametrize("forward", ["tree", "padded", "turn_by_turn"])
def test_a_batch_of_failures_asks_no_reward_and_learns_nothing(build, forward):
    def never(completions, **kwargs):
        raise AssertionError

    _, learnt = gradient(build(failing({0, 1, 2, 3}, 0), rewards=((), (never,)), forward=forward))
    assert not learnt.any()


def test_two_batches_of_failed_conversations_end_the_run(build, tmp_path):
    trainer = build(lambda session, turn: EngineError("HTTP 400: too many stop strings"))
    with pytest.raises(RolloutError, match="Every conversation.*too many stop strings"):
        trainer.train()
    assert len(open_run(tmp_path).rows) == 8


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rewards": ((), ())}, "no reward"),
        ({"num_generations": 3}, "`num_generations: 3` does not divide .* set it to one of 2, 4, or make"),
        ({"do_eval": True, "per_device_eval_batch_size": 3}, "one of 1, 3"),
        ({"max_turn_length": 0}, "`max_turn_length` is 0"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "normalize_then_sum"),
        ({"max_tool_calling_iterations": -1}, "`max_tool_calling_iterations` is -1; set 0 or more"),
        ({"beta": -0.1}, "`beta` is -0.1; set a number from 0 on, or leave it out"),
        ({"epsilon": -0.2}, "`epsilon` is -0.2; set 0 or more"),
        # what contradicts the environment that the trainer is given
        ({"tool_timeout": 5.0}, "`tool_timeout` is 5.0 in the arguments and 60.0 in the `env`"),
        ({"tool_timeout": None}, "`tool_timeout` is None in the arguments and 60.0 in the `env`"),
        ({"env_mask": 1}, "`env_mask` is 1 in the arguments and 0 in the `env`"),
        ({"max_env_steps": 7}, "`max_env_steps` is 7 in the arguments and 3 in the `env`"),
        ({"tools": ["calculator"]}, r"`tools` is \['calculator'\] in the arguments and \['lookup'\] in the `env`"),
        ({"system_prompt": "Search."}, "`system_prompt` is 'Search.' in the arguments and None in the `env`"),
        ({"call_protocol": "native"}, "`call_protocol` is 'native' in the arguments and 'learnt_tags' in the `env`"),
        ({"env": "test_trainer.Searching"}, "`env` is 'test_trainer.Searching' in the arguments and 'MultiTurnTo"),
    ],
)
def test_wrong_options_are_refused_with_the_mend(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(**options).train()


class Searching(MultiTurnToolEnv):
    """An environment that a recipe names, with rules of its own."""

    def __init__(self, tools=(), max_steps=5, **options):
        super().__init__([lookup, *tools], max_steps=2, **options)


def test_options_that_agree_with_the_environment_are_none(build):
    options = {"env_mask": 0, "tools": ["support.models.lookup"], "call_protocol": "learnt_tags"}
    assert build(max_env_steps=3, **options).env.max_steps == 3
    args = build(env=None, env_mask=0).args
    args.env, args.max_env_steps, args.tools = "test_trainer.Searching", 4, ["calculator"]
    for env in (None, source_of(build_env(args))):  # a source was made from the options, and contradicts none
        found = build(env=env, args=args).env
        assert found.max_steps == 2 and list(found.tools) == ["lookup", "calculator"]
