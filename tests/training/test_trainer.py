"""The trainer on scripted and sampled rollouts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support.models import CPU_RUN, build_model, lookup
from support.trainers import LOSS_TYPES, Answered, Letters, batch, conversation, member, trainer_builder
from trl import GRPOConfig, GRPOTrainer

from mt_grpo.credit import estimate
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.envs.source import source_of
from mt_grpo.rewards import OutcomeReward, RewardError
from mt_grpo.rollout import EngineError, RolloutError, ScriptedEngine
from mt_grpo.runlog import open_run
from mt_grpo.training import ConfigError, MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.training.checkpoint import load_rollouts, save_rollouts
from mt_grpo.training.environment import build_env


def test_sampled_tokens_are_trained_and_tool_results_are_seen(build, tokenizer):
    trainer = build()
    inputs = batch(trainer)
    requests = trainer.runner.engine.requests
    for row in range(4):
        real = inputs["completion_mask"][row].bool()
        trained = real & inputs["tool_mask"][row].bool()
        sampled = [token for session, _, sample in requests if member(session) == row for token in sample.ids]
        assert inputs["completion_ids"][row][trained].tolist() == sampled
        whole = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist()
        whole += inputs["completion_ids"][row][real].tolist()  # the attention mask lets the model see all of it
        last = max((r for r in requests if member(r[0]) == row), key=lambda r: len(r[1]))
        assert whole == last[1] + last[2].ids
        assert row == 2 or "about Lima" in tokenizer.decode(inputs["completion_ids"][row][real & ~trained])


def test_the_loss_reads_tool_results_but_is_not_taken_on_them(build):
    trainer = build()
    inputs = batch(trainer)
    row = 1
    environment = inputs["completion_mask"][row].bool() & ~inputs["tool_mask"][row].bool()
    position = environment.nonzero()[3].item()
    arguments = (
        trainer.model,
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        inputs["completion_ids"].shape[1],
    )
    before = trainer._get_per_token_logps_and_entropies(*arguments)[0][row]
    trainer.batch.token_rows[row].ids[position] += 1
    after = trainer._get_per_token_logps_and_entropies(*arguments)[0][row]
    answer = (inputs["completion_mask"][row] * inputs["tool_mask"][row]).bool()
    answer[:position] = False
    assert (before - after)[answer].abs().min() > 1e-6


def test_each_token_gets_the_advantage_of_its_turn(build):
    inputs = batch(trainer := build())
    rewards = trainer.batch.rewards
    outcomes = rewards.outcome_rewards
    outcome = (outcomes - outcomes.mean()) / (outcomes.std() + 1e-4)
    sums = torch.tensor([2.0, 1.0, 0.0, 1.0])
    turn = (sums - sums.mean()) / (sums.std() + 1e-4)
    merged = outcomes + sums
    merged = (merged - merged.mean()) / (merged.std() + 1e-4)
    expected = {  # turns up to the first result get the turn advantage too
        0: [outcome[0] + turn[0], outcome[0], outcome[0]],
        1: [outcome[1] + turn[1], outcome[1]],
        2: [merged[2]],
        3: [outcome[3] + turn[3], outcome[3] + turn[3], outcome[3]],
    }
    for row, advantages in expected.items():
        mask = (inputs["completion_mask"][row] * inputs["tool_mask"][row]).bool()
        lengths = [turn.num_tokens for turn in trainer.batch.trajectories[row].turns]
        wanted = torch.cat([torch.full((n,), float(a)) for n, a in zip(lengths, advantages, strict=True)])
        torch.testing.assert_close(inputs["advantages"][row][mask], wanted)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_trains(build, tmp_path, model, loss_type):
    model.save_pretrained(tmp_path / "model")  # the reference model is loaded from there
    trainer = build(model=str(tmp_path / "model"), loss_type=loss_type, max_steps=1, beta=0.01)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    result = trainer.train()
    assert torch.isfinite(torch.tensor(result.training_loss))
    assert any((a != b).any() for a, b in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_iterations": 2},
        {"steps_per_generation": 2, "forward": "padded"},  # the tree forward deals whole groups to micro-batches
        {"loss_type": "grpo"},
    ],
)
@pytest.mark.slow
def test_with_one_turn_and_no_tools_it_is_trl_grpo(build, tmp_path, tokenizer, questions, options):
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
    arguments = {
        name: getattr(ours.args, name)
        for name in (
            "output_dir use_cpu bf16 gradient_checkpointing disable_tqdm per_device_train_batch_size "
            "num_generations max_completion_length learning_rate max_steps save_strategy logging_steps "
            "loss_type num_iterations optim"
        ).split()
    }
    stock = GRPOTrainer(
        build_model(tokenizer),
        reward,
        GRPOConfig(**arguments, report_to=[], steps_per_generation=options.get("steps_per_generation")),
        questions,
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    for trainer in (ours, stock):
        torch.manual_seed(0)
        trainer.train()
    losses = [
        [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]
        for trainer in (ours, stock)
    ]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-5, atol=1e-7)
    for a, b in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps_per_generation": 4, "num_iterations": 2},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
    ],
)
@pytest.mark.slow
def test_a_resumed_run_takes_the_same_next_step(build, tmp_path, options):
    options = {"max_steps": 5, "temperature": 1.0, "max_turn_length": 12, "learning_rate": 1e-3, **options}
    folders = [str(tmp_path / name) for name in ("whole", "cut")]
    rewards = ((), (Letters(),))
    whole = build(None, rewards=rewards, output_dir=folders[0], **options)
    whole.train()
    assert any(row.get("grad_norm") for row in whole.state.log_history)
    build(None, rewards=rewards, output_dir=folders[1], save_strategy="steps", save_steps=3, **options).train()
    resumed = build(None, rewards=rewards, output_dir=folders[1], **options)
    resumed.train(resume_from_checkpoint=f"{folders[1]}/checkpoint-3")
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("number", [2, 3], ids=["between epochs", "in the second epoch"])
def test_a_resumed_run_keeps_the_order_of_later_epochs(build, tmp_path, number):
    """Eight questions, four per step: an epoch is two steps."""
    options = {"per_device_train_batch_size": 8, "num_generations": 2, "max_steps": 6, "learning_rate": 0.0}

    def answered(folder, **more):
        answer = lambda session, turn: f"<answer>Lima {member(session)}</answer>"  # noqa: E731
        build(answer, output_dir=str(folder), **options, **more).train(more.get("resume_from_checkpoint"))
        return [(row["step"], row["prompt"]) for row in open_run(folder).rows]

    whole = answered(tmp_path, save_strategy="steps", save_steps=1)
    assert answered(tmp_path, resume_from_checkpoint=str(tmp_path / f"checkpoint-{number}")) == whole


@pytest.mark.slow
def test_a_step_that_was_cut_short_begins_again(tmp_path, tokenizer, questions):
    """Three batches per epoch, two per step: the third step begins with the fourth batch, and is cut in the fifth."""
    build = trainer_builder(tmp_path, tokenizer, questions.select(range(3)))
    options = {"max_steps": 4, "temperature": 1.0, "max_turn_length": 12, "learning_rate": 1e-3}
    options |= {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "rewards": ((), (Letters(),))}
    whole = build(None, output_dir=str(tmp_path / "whole"), **options)
    whole.train()

    class Cut(Letters):
        def score(self, trajectory, **row):
            if trajectory.session.startswith("train-000002") and cut.accelerator.gradient_state.sync_gradients:
                raise KeyboardInterrupt
            return super().score(trajectory, **row)

    cut = build(None, output_dir=str(tmp_path / "cut"), **{**options, "rewards": ((), (Cut(),))})
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    folder = cut.save_checkpoint()
    resumed = build(None, output_dir=str(tmp_path / "cut"), **options)
    resumed.train(resume_from_checkpoint=str(folder))
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_of_version_0_1_keeps_its_forks(tmp_path):
    one = SimpleNamespace(process_index=0, num_processes=1, device="cpu")
    forks = torch.tensor([[-1, 0, -1]])
    save_rollouts(tmp_path, one, 3, [{"parents": forks}], {})
    _, (loaded,), _ = load_rollouts(tmp_path, one, {"max_staleness": 0})
    assert loaded.keys() == {"parent"} and loaded["parent"].equal(forks)


def test_sampled_log_probs_are_those_of_the_trained_model(build):
    trainer = build(None, temperature=0.7, max_turn_length=10)
    inputs = batch(trainer)
    logps, _, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        inputs["completion_ids"].shape[1],
    )
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    torch.testing.assert_close(logps[mask], inputs["sampling_per_token_logps"][mask], rtol=0, atol=2e-5)


def test_lora_trains_the_adapter_and_samples_with_it(build):
    adapter = LoraConfig(target_modules=["q_proj", "v_proj"])
    trainer = build(None, rewards=((), (Letters(),)), max_turn_length=8, peft_config=adapter)
    frozen = {n: p.clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    moved = {n: p for n, p in trainer.model.named_parameters() if not p.requires_grad}
    assert all(torch.equal(frozen[name], moved[name]) for name in frozen)
    assert any(p.abs().sum() > 0 for n, p in trainer.model.named_parameters() if "lora_B" in n)


def test_evaluation_has_its_own_number_of_generations(build):
    trainer = build(num_generations_eval=1, per_device_eval_batch_size=8, do_eval=True)  # more than a training batch
    metrics = trainer.evaluate()
    assert len(trainer.eval_trajectories) == len(trainer.eval_dataset)
    assert metrics["eval_rewards/Answered/mean"] > 0
    assert metrics["eval_stop/answered"] == 1.0


def test_metrics_are_logged_by_turn(build, tmp_path):
    build(max_steps=1).train()
    logged = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert logged["turns/mean"] == (3 + 2 + 1 + 3) / 4
    assert logged["tools/call_frequency"] == 4 / 4 and logged["tools/failure_frequency"] == 0
    assert logged["tools/malformed_frequency"] == logged["turn_1/malformed"] == 1 / 4
    assert logged["turn_1/tool_calls"] == 2 / 4 and logged["turn_1/failures"] == 0
    assert logged["turn_1/reward"] == pytest.approx(2 / 3) and logged["turn_2/reward"] == 1.0
    assert "turn_3/advantage" in logged and "turn_3/reward" not in logged
    assert logged["stop/answered"] == 1.0
    assert logged["rewards/Calls/mean"] == pytest.approx(4 / 3)


def test_reward_weights_scale_turn_and_outcome_rewards(build):
    plain, weighted = build(), build(reward_weights=[3.0, 0.5])
    batch(plain), batch(weighted)
    torch.testing.assert_close(
        weighted.batch.rewards.turn_rewards, 3 * plain.batch.rewards.turn_rewards, equal_nan=True
    )
    torch.testing.assert_close(weighted.batch.rewards.outcome_rewards, plain.batch.rewards.outcome_rewards / 2)


def test_truncated_completions_can_be_left_out_of_the_loss(build):
    trainer = build(max_turn_length=20, mask_truncated_completions=True)
    inputs = batch(trainer)
    truncated = [trajectory.stop_reason.value == "length" for trajectory in trainer.batch.trajectories]
    assert truncated == [True, True, False, True]
    assert inputs["tool_mask"].mul(inputs["completion_mask"]).sum(dim=1).bool().tolist() == [False, False, True, False]
    assert inputs["completion_mask"].sum(dim=1).min() > 0


def test_a_conversation_that_never_began_is_not_trained(build):
    def script(session, turn):
        return EngineError("the server is gone") if member(session) == 1 else conversation(session, turn)

    trainer = build(script)
    inputs = batch(trainer)
    assert inputs["tool_mask"][1].mul(inputs["completion_mask"][1]).sum() == 0
    assert torch.isfinite(trainer._compute_loss(trainer.model, inputs))
    assert trainer.batch.trajectories[1].stop_reason.value == "engine_error"


@pytest.mark.parametrize("forward", ["tree", "padded", "turn_by_turn"])
def test_a_batch_without_sampled_tokens_passes_the_backward(build, forward):
    trainer = build(lambda session, turn: EngineError("the server is gone"), forward=forward)
    trainer._compute_loss(trainer.model, batch(trainer)).backward()
    assert all(not parameter.grad.any() for parameter in trainer.model.parameters() if parameter.grad is not None)


def test_two_batches_of_failed_conversations_end_the_run(build, tmp_path):
    trainer = build(lambda session, turn: EngineError("HTTP 400: too many stop strings"))
    with pytest.raises(RolloutError, match="Every conversation.*too many stop strings"):
        trainer.train()
    assert len(open_run(tmp_path).rows) == 8


def test_a_reward_that_raises_is_named_and_loses_no_trajectory(build, tmp_path):
    class Broken(OutcomeReward):
        def score(self, trajectory, **row):
            raise KeyError("gold")

    trainer = build(rewards=((), (Broken(),)))
    with pytest.raises(RewardError, match="Broken.*KeyError"):
        trainer.train()
    assert len(list(open_run(tmp_path).trajectories())) == 4


def test_the_table_of_completions_shows_the_trained_advantage(build):
    trainer = build()
    batch(trainer)
    outcome = trainer.batch.rewards.outcome_rewards
    assert len(trainer._logs["advantages"]) == len(outcome) == 4
    rewards = estimate("mt_grpo", trainer.batch.rewards, turn_coef=1.0)
    turns = trainer.batch.rewards.turn_mask
    means = (rewards * turns).sum(1) / turns.sum(1)
    torch.testing.assert_close(torch.tensor(list(trainer._logs["advantages"])), means)


def test_without_any_reward_it_refuses(build):
    with pytest.raises(ConfigError, match="no reward"):
        build(rewards=((), ()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_generations": 3}, "one of 2, 4"),
        ({"do_eval": True, "per_device_eval_batch_size": 3}, "one of 1, 3"),
        ({"max_turn_length": 0}, "`max_turn_length` is 0"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "normalize_then_sum"),
        ({"advantage_estimator": "mtgrpo"}, "mt_grpo"),
        ({"max_tool_calling_iterations": -1}, "`max_tool_calling_iterations` is -1; set 0 or more"),
        ({"beta": -0.1}, "`beta` is -0.1; set 0 or more"),
        ({"epsilon": -0.2}, "`epsilon` is -0.2; set 0 or more"),
    ],
)
def test_wrong_options_are_refused_with_the_mend(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(**options).train()


class Searching(MultiTurnToolEnv):
    """An environment that a recipe names, with rules of its own."""

    def __init__(self, tools=(), max_steps=5, **options):
        super().__init__([lookup, *tools], max_steps=2, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
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
def test_an_environment_that_contradicts_the_options_is_refused(build, options, message):
    with pytest.raises(ConfigError, match=message):
        build(**options)


def test_options_that_agree_with_the_environment_are_none(build):
    assert (
        build(max_env_steps=3, env_mask=0, tools=["support.models.lookup"], call_protocol="learnt_tags").env.max_steps
        == 3
    )


def test_an_environment_from_options_may_have_its_own_rules(build, tmp_path, tokenizer, questions):
    args = MTGRPOConfig(str(tmp_path), **CPU_RUN, env="test_trainer.Searching", max_env_steps=4, tools=["calculator"])
    options = {"outcome_reward_funcs": [Answered()], "train_dataset": questions, "processing_class": tokenizer}
    engine = ScriptedEngine(tokenizer, conversation)
    for env in (None, source_of(build_env(args))):  # a source was made from the options, and contradicts none
        trainer = MTGRPOEnvTrainer(build_model(tokenizer), env, args=args, engine=engine, **options)
        assert trainer.env.max_steps == 2 and list(trainer.env.tools) == ["lookup", "calculator"]


def test_a_conversation_that_cannot_begin_is_not_trained(build):
    class Env(MultiTurnToolEnv):
        def start(self, prompt):
            started.append(prompt)
            if len(started) == 2:
                raise ConnectionError("no container")
            return super().start(prompt)

    trainer, started = build(), []
    trainer.runner.env = Env([lookup], protocol="learnt_tags", max_steps=3)
    inputs = batch(trainer)
    assert [trajectory.stop_reason.value for trajectory in trainer.batch.trajectories].count("env_error") == 1
    assert inputs["tool_mask"][1].mul(inputs["completion_mask"][1]).sum() == 0
    assert torch.isfinite(trainer._compute_loss(trainer.model, inputs))


def test_a_run_that_begins_anew_samples_anew(build):
    """What an interrupted run had sampled is not trained by the next one."""
    sessions = []

    def script(session, turn):
        sessions.append(session)
        return "<answer>Lima</answer>"

    trainer = build(script, steps_per_generation=2, gradient_accumulation_steps=1, num_iterations=2, max_steps=3)
    trainer._step, trainer._buffered_inputs = 3, [{}, {}]  # as if interrupted there
    trainer.train()
    assert trainer.state.global_step == 3 and len(sessions) == 8 and trainer._step == 3


def test_rows_reach_rewards_as_columns(build, questions):
    seen = []

    class Column(OutcomeReward):
        def score(self, trajectory, answer, **row):
            seen.append(answer)
            return 0.0

    trainer = build(rewards=((), (Column(),)))
    batch(trainer)
    assert seen == [questions[0]["answer"]] * 4


def test_plain_text_prompts_work(build, tokenizer):
    trainer = build()
    trainer.train_dataset = Dataset.from_list([{"prompt": "What is Lima"}])
    batch(trainer)
    assert trainer.batch.trajectories[0].prompt == [{"role": "user", "content": "What is Lima"}]
