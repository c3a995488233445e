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


def ours(tmp_path, factory, script, data, rewards=(), **options):
    tokenizer = build_tokenizer()
    options = {"output_dir": str(tmp_path), **CPU_RUN, "max_completion_length": 300, "max_steps": 1, **options}
    return MTGRPOEnvTrainer(
        build_model(tokenizer, max_position_embeddings=2048),
        args=MTGRPOConfig(**options),
        environment_factory=factory,
        outcome_reward_funcs=list(rewards),
        train_dataset=data,
        engine=ScriptedEngine(tokenizer, by_script(script)),
        processing_class=tokenizer,
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
    args = MTGRPOConfig(str(tmp_path), **CPU_RUN, max_completion_length=300, max_steps=1, reward_weights=[2.0])
    before, tokenizer = {**vars(args)}, build_tokenizer()
    trainer = MTGRPOEnvTrainer(
        build_model(tokenizer, max_position_embeddings=2048),
        args=args,
        environment_factory=Ledger,
        reward_funcs=totals,
        train_dataset=rows(),
        engine=ScriptedEngine(tokenizer, by_script(LEDGER)),
        processing_class=tokenizer,
    )
    assert vars(args) == before and trainer.reward_weights.tolist() == [2.0, 1.0]
    args.max_steps = 0
    with pytest.raises(ConfigError, match="`max_steps` is 0"):
        trainer.train()


@pytest.mark.parametrize("streams", [False, True])
def test_rows_to_evaluate_on_need_no_prompt_either(tmp_path, streams):
    trainer = ours(tmp_path, Ledger, LEDGER, rows())
    data = rows().remove_columns("prompt")
    again = MTGRPOEnvTrainer(
        trainer.model,
        args=trainer.args,
        environment_factory=Ledger,
        train_dataset=data.to_iterable_dataset() if streams else data,
        eval_dataset={"held_out": data},
        engine=trainer.runner.engine,
        processing_class=trainer.processing_class,
    )
    assert again.evaluate()["eval_held_out_loss"]
    assert next(iter(again.train_dataset))["prompt"][0]["content"] == ""


def test_rows_to_evaluate_on_need_the_columns_of_reset_too(tmp_path):
    class Dated(Ledger):
        def reset(self, start, date):
            return None

    tokenizer = build_tokenizer()
    with pytest.raises(ConfigError, match="needs `date`, which is no column of the evaluation dataset"):
        MTGRPOEnvTrainer(
            build_model(tokenizer),
            args=MTGRPOConfig(str(tmp_path), **CPU_RUN),
            environment_factory=Dated,
            train_dataset=rows(date="today"),
            eval_dataset=rows(),
            processing_class=tokenizer,
        )


def test_a_class_may_be_the_only_reward_and_the_only_data(tmp_path):
    trainer = ours(tmp_path, Ledger, LEDGER, None)
    assert trainer.reward_func_names == ["Ledger"] and len(trainer.train_dataset) == 1
    trainer.train()
    assert trainer.state.global_step == 1
    assert trainer.runner.env.protocol.native_tools and len(trainer.env.pool) == 4


def test_rows_need_no_prompt(tmp_path):
    trainer = ours(tmp_path, Ledger, LEDGER, rows().remove_columns("prompt"))
    batch = one_batch(trainer)
    assert batch.trajectories[0].prompt == [{"role": "user", "content": " It begins at 1."}]


def test_weights_count_the_listed_rewards_only(tmp_path):
    trainer = ours(tmp_path, Ledger, LEDGER, rows(), [totals], reward_weights=[0.5])
    assert trainer.reward_weights.tolist() == [0.5, 1.0]


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


@pytest.mark.parametrize(
    ("factory", "data", "options", "problem"),
    [
        (3, rows(), {}, "`environment_factory` is 3, which cannot be called"),
        ({}, rows(), {}, "`environment_factory` is an empty dictionary"),
        (Ledger, None, {"max_steps": -1}, "There is no dataset, .* set `max_steps`"),
        ({"a": Ledger}, None, {}, r"Several environments \(a\) need a dataset"),
        ({"ledger": Ledger}, rows(), {}, "the dataset has no column `environment`"),
        ({"ledger": Ledger}, rows(environment="ledgers"), {}, "names the environment 'ledgers'.*'ledger'"),
        (Ledger, rows(), {"env": "a.b"}, "`env` and `environment_factory` both say who answers"),
        (Ledger, rows(), {"environments": {"a": {}}}, "`environment_factory` and `environments` are both set"),
        (None, rows(), {"environment_factory": {"a": 3}}, "`environment_factory: a` is 3: give a dotted path"),
        (None, rows(), {"environment_factory": "a.b"}, "The environment factory 'a.b' does not import"),
        (
            None,
            rows(environment="a"),
            {"environments": {"a": {"environment_factory": {"b": "support.trl_environments.Ledger"}}}},
            "`environments: a` has several factories",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path, factory, data, options, problem):
    with pytest.raises((ConfigError, ValueError), match=problem):
        ours(tmp_path, factory, LEDGER, data, **options)


def test_a_factory_beside_an_environment_is_refused(tmp_path):
    args = MTGRPOConfig(str(tmp_path), **CPU_RUN)
    with pytest.raises(ConfigError, match="both `env` and `environment_factory`"):
        MTGRPOEnvTrainer("embedded", MultiTurnToolEnv(), args=args, environment_factory=Ledger)


def test_a_reward_named_as_the_class_is_refused(tmp_path):
    def ledger(completions, **columns):
        return [0.0] * len(completions)

    ledger.__name__ = "Ledger"
    with pytest.raises(ConfigError, match="'Ledger' has the name of an environment class"):
        ours(tmp_path, Ledger, LEDGER, rows(), [ledger])


class Silent:
    """Has neither tools nor a reward."""

    def reset(self, **row):
        pass


def test_a_class_without_a_reward_needs_one(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="There is no reward"):
        ours(tmp_path, Silent, LEDGER, rows())
    assert "The environment Silent has no tools" in caplog.text


class Needy(Silent):
    def reset(self, strat):
        pass


def test_a_column_that_reset_needs_is_missed_before_any_work(tmp_path):
    with pytest.raises(ConfigError, match="`reset` of the environment Needy needs `strat`.*the nearest is 'start'"):
        ours(tmp_path, Needy, LEDGER, rows(), [totals])


def test_an_environment_that_no_row_names_is_told(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        ours(tmp_path, {"a": Ledger, "b": Doors}, LEDGER, rows(environment="a"))
    assert "No row of the dataset names the environment 'b'" in caplog.text
