"""The trainer with environments of TRL's form: the same conversations and rewards as in TRL."""

from __future__ import annotations

import logging

import pytest
import torch
from datasets import Dataset
from support.models import CPU_RUN, build_model, build_tokenizer
from support.trl_environments import DOORS, LEDGER, Doors, Ledger, by_script
from trl import GRPOConfig, GRPOTrainer

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.errors import ConfigError
from mt_grpo.integrations.trl import TRLEnv
from mt_grpo.rollout import ScriptedEngine
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer

ROWS = [{"prompt": [{"role": "user", "content": f"Play {number}."}], "start": number} for number in range(4)]


def rows(**columns):
    return Dataset.from_list([{**row, **columns} for row in ROWS])


def totals(environments, completions, **columns):
    """Reads the user's instance, as TRL's functions do."""
    return [float(isinstance(one, Ledger) and one.total > 5) for one in environments]


def ours(tmp_path, factory, script, data, rewards=(), **given):
    """A trainer of a factory, and of options that a recipe may have."""
    tokenizer = build_tokenizer()
    arguments = {name: given.pop(name) for name in ("env", "eval_dataset") if name in given}
    options = {**CPU_RUN, "max_completion_length": 300, "max_steps": 1, **given}
    return MTGRPOEnvTrainer(
        build_model(tokenizer, max_position_embeddings=2048),
        args=MTGRPOConfig(str(tmp_path), **options),
        environment_factory=factory,
        outcome_reward_funcs=list(rewards),
        train_dataset=data,
        engine=ScriptedEngine(tokenizer, by_script(script)),
        processing_class=tokenizer,
        **arguments,
    )


class Scripted(GRPOTrainer):
    """TRL's own trainer; what the model says is a script, everything else TRL's."""

    def __init__(self, *args, script, **kwargs):
        super().__init__(*args, **kwargs)
        self.script, self.said, self.scored = script, {}, None

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        texts = []
        for ids in prompt_ids:
            first = next((number for number, begun in self.said.items() if begun["ids"] == ids[: begun["size"]]), None)
            if first is None or len(self.said) < 4:
                first = len(self.said)
                self.said[first] = {"ids": ids, "size": len(ids), "turn": 0}
            begun = self.said[first]
            texts.append(self.script[first][begun["turn"]] + "<|im_end|>")
            begun["turn"] += 1
            begun["ids"] = ids + self.processing_class.encode(texts[-1], add_special_tokens=False)
            begun["size"] = len(begun["ids"])
        return [self.processing_class.encode(text, add_special_tokens=False) for text in texts], None

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids):
        self.scored = prompts, completions, super()._calculate_rewards(inputs, prompts, completions, completion_ids)
        return self.scored[2]


def in_trl(tmp_path, factory, script, data, rewards=()):
    tokenizer = build_tokenizer()
    args = GRPOConfig(str(tmp_path), **CPU_RUN, max_completion_length=300, max_steps=1)
    trainer = Scripted(
        build_model(tokenizer, max_position_embeddings=2048),
        list(rewards) or None,
        args,
        train_dataset=data,
        processing_class=tokenizer,
        environment_factory=factory,
        script=script,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer._generate_and_score_completions([dict(data[1])] * 4)
    return trainer


def one_batch(trainer):
    trainer.current_gradient_accumulation_steps = 1
    trainer._generate_and_score_completions([dict(trainer.train_dataset[1])] * 4)
    return trainer.batch


def said(messages):
    """What a model reads of messages, without the ids that only ours gives to calls."""
    return [
        (
            message["role"],
            message.get("content") or "",
            [call["function"] for call in message.get("tool_calls") or []],
        )
        for message in messages
    ]


@pytest.mark.parametrize(
    ("factory", "script", "rewards", "columns"),
    [
        (Ledger, LEDGER, [totals], {}),
        (Doors, DOORS, [], {}),
        ({"ledger": Ledger, "doors": Doors}, LEDGER, [totals], {"environment": "ledger"}),
    ],
    ids=["plain", "async", "by name"],
)
def test_messages_and_rewards_are_those_of_trl(tmp_path, factory, script, rewards, columns):
    data = rows(**columns)
    if isinstance(factory, dict):
        data = Dataset.from_list([{**data[0], "environment": "doors"}, *list(data)[1:]])
    trl = in_trl(tmp_path / "trl", factory, script, data, rewards)
    trainer = ours(tmp_path / "ours", factory, script, data, rewards)
    batch = one_batch(trainer)
    assert trainer.reward_func_names == trl.reward_func_names
    torch.testing.assert_close(batch.rewards_per_func, trl.scored[2], equal_nan=True)
    for trajectory, prompt, completion in zip(batch.trajectories, *trl.scored[:2], strict=True):
        # TRL appends replies to the prompt that it rewards
        assert said(trajectory.prompt) == said(prompt[: len(trajectory.prompt)])
        mine, theirs = said(trajectory.completion), said(completion)
        if "unknown tool" not in str(mine):  # ours names the tools that there are
            assert mine == theirs


def test_the_options_given_stay_as_they_were_and_count(tmp_path):
    """Weights are of the listed rewards only."""
    args = MTGRPOConfig(str(tmp_path), **CPU_RUN, max_completion_length=300, max_steps=1, reward_weights=[2.0])
    before, first = {**vars(args)}, ours(tmp_path, Ledger, LEDGER, rows(), [totals])
    given = {"engine": first.runner.engine, "processing_class": first.processing_class, "train_dataset": rows()}
    model = build_model(first.processing_class, max_position_embeddings=2048)
    trainer = MTGRPOEnvTrainer(model, args=args, environment_factory=Ledger, reward_funcs=totals, **given)
    assert vars(args) == before and trainer.reward_weights.tolist() == [2.0, 1.0]
    args.max_steps = 0
    with pytest.raises(ConfigError, match="`max_steps` is 0"):
        trainer.train()


@pytest.mark.parametrize("streams", [False, True])
def test_rows_need_no_prompt(tmp_path, streams):
    """Neither those to train on nor those to evaluate on."""
    data = rows().remove_columns("prompt")
    trained = data.to_iterable_dataset() if streams else data
    trainer = ours(tmp_path, Ledger, LEDGER, trained, eval_dataset={"held_out": data})
    assert trainer.evaluate()["eval_held_out_loss"]
    assert next(iter(trainer.train_dataset))["prompt"][0]["content"] == ""
    if not streams:
        assert one_batch(trainer).trajectories[0].prompt == [{"role": "user", "content": " It begins at 1."}]


def test_a_class_may_be_the_only_reward_and_the_only_data(tmp_path):
    trainer = ours(tmp_path, Ledger, LEDGER, None)
    assert trainer.reward_func_names == ["Ledger"] and len(trainer.train_dataset) == 1
    trainer.train()
    assert trainer.state.global_step == 1
    assert trainer.runner.env.protocol.native_tools and len(trainer.env.pool) == 4


def test_recipes_name_factories_by_path(tmp_path):
    paths = {"ledger": "support.trl_environments.Ledger", "doors": "support.trl_environments:Doors"}
    data = Dataset.from_list([{**ROWS[0], "environment": "ledger"}, {**ROWS[1], "environment": "doors"}])
    trainer = ours(tmp_path, None, DOORS, data, environment_factory=paths, tools=["calculator"])
    assert {name: type(env) for name, env in trainer.env.items()} == {"ledger": TRLEnv, "doors": TRLEnv}
    assert trainer.reward_func_names == ["Ledger", "Doors"]
    assert sorted(trainer.env["doors"].tools) == ["calculator", "unlock"]
    batch = one_batch(trainer)
    assert batch.trajectories[1].rewards["outcome"] == {"Ledger": None, "Doors": 1.0}


def test_an_environment_among_others_may_be_a_factory(tmp_path):
    environments = {
        "ledger": {"environment_factory": "support.trl_environments.Ledger", "max_env_steps": 5},
        "tools": {"tools": ["calculator"]},
    }
    data = Dataset.from_list([{**ROWS[0], "environment": "tools"}, {**ROWS[1], "environment": "ledger"}])
    trainer = ours(tmp_path, None, LEDGER, data, environments=environments)
    assert trainer.env["ledger"].max_steps == 5 and trainer.env["ledger"].named
    assert one_batch(trainer).trajectories[0].env_rewards == {"Ledger": 12.0}


# Refused at the door


class Silent:
    """Has neither tools nor a reward."""

    def reset(self, **row):
        pass


class Needy(Silent):
    def reset(self, strat):
        pass


class Dated(Ledger):
    def reset(self, start, date):
        return None


def ledger(completions, **columns):
    return [0.0] * len(completions)


ledger.__name__ = "Ledger"
TWO = {"a": {"environment_factory": {"b": "support.trl_environments.Ledger"}}}


@pytest.mark.parametrize(
    ("factory", "data", "options", "problem"),
    [
        (3, rows(), {}, "`environment_factory` is 3, which cannot be called"),
        ({}, rows(), {}, "`environment_factory` is an empty dictionary"),
        (Ledger, None, {"max_steps": -1}, "There is no dataset, .* set `max_steps`"),
        ({"a": Ledger}, None, {}, r"Several environments \(a\) need a dataset"),
        ({"ledger": Ledger}, rows(), {}, "the dataset has no column `environment`"),
        ({"ledger": Ledger}, rows(environment="ledgers"), {}, "names the environment 'ledgers'.*'ledger'"),
        (Ledger, rows(), {"env": MultiTurnToolEnv()}, "both `env` and `environment_factory`"),
        (Ledger, rows(), {"environments": {"a": {}}}, "`environment_factory` and `environments` are both set"),
        (None, rows(), {"environment_factory": {"a": 3}}, "`environment_factory: a` is 3: give a dotted path"),
        (None, rows(), {"environment_factory": "a.b"}, "The environment factory 'a.b' does not import"),
        (None, rows(environment="a"), {"environments": TWO}, "`environments: a` has several factories"),
        (Ledger, rows(), {"rewards": [ledger]}, "'Ledger' has the name of an environment class"),
        (
            Dated,
            rows(date="today"),
            {"eval_dataset": rows()},
            "needs `date`, which is no column of the evaluation dataset",
        ),
        (
            Needy,
            rows(),
            {"rewards": [totals]},
            "`reset` of the environment Needy needs `strat`.*the nearest is 'start'",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path, factory, data, options, problem):
    with pytest.raises((ConfigError, ValueError), match=problem):
        ours(tmp_path, factory, LEDGER, data, **options)


def test_options_name_one_thing_that_answers(tmp_path):
    args = MTGRPOConfig(str(tmp_path), **CPU_RUN, env="a.b")
    with pytest.raises(ConfigError, match="`env` and `environment_factory` both say who answers"):
        MTGRPOEnvTrainer("embedded", args=args, environment_factory=Ledger)


def test_a_class_without_a_reward_needs_one(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="There is no reward"):
        ours(tmp_path, Silent, LEDGER, rows())
    assert "The environment Silent has no tools" in caplog.text


def test_an_environment_that_no_row_names_is_told(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        ours(tmp_path, {"a": Ledger, "b": Doors}, LEDGER, rows(environment="a"))
    assert "No row of the dataset names the environment 'b'" in caplog.text
