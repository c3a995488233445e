"""The trainer with environments of TRL's form: the same conversations and rewards as in TRL."""

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
SHORT = {**CPU_RUN, "max_completion_length": 300, "max_steps": 1}


def rows(*environments, **columns):
    """Rows, as many as environments are named or four."""
    if environments:
        return Dataset.from_list([{**ROWS[n], "environment": name} for n, name in enumerate(environments)])
    return Dataset.from_list([{**row, **columns} for row in ROWS])


def totals(environments, completions, **columns):
    """Reads the user's instance, as TRL's functions do."""
    return [float(isinstance(one, Ledger) and one.total > 5) for one in environments]


def model_of(tokenizer):
    return build_model(tokenizer, max_position_embeddings=2048)


def ours(tmp_path, factory, script, data, rewards=(), **given):
    """A trainer of a factory, and of options that a recipe may have."""
    tokenizer = build_tokenizer()
    arguments = {name: given.pop(name) for name in ("env", "eval_dataset") if name in given}
    return MTGRPOEnvTrainer(
        model_of(tokenizer),
        args=MTGRPOConfig(str(tmp_path), **SHORT | given),
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
        self.script, self.said, self.scored = script, [], None

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        sampled = []
        for ids in prompt_ids:
            begun = next((each for each in self.said if each["ids"] == ids[: len(each["ids"])]), None)
            if len(self.said) < 4:
                begun = {"turns": iter(self.script[len(self.said)])}
                self.said.append(begun)
            sampled.append(self.processing_class.encode(next(begun["turns"]) + "<|im_end|>", add_special_tokens=False))
            begun["ids"] = ids + sampled[-1]
        return sampled, None

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids):
        self.scored = prompts, completions, super()._calculate_rewards(inputs, prompts, completions, completion_ids)
        return self.scored[2]


def sample(trainer):
    """Four conversations about the second row."""
    trainer.current_gradient_accumulation_steps = 1
    trainer._generate_and_score_completions([dict(trainer.train_dataset[1])] * 4)
    return trainer


def said(messages):
    """What a model reads of messages, without the ids that only ours gives to calls."""
    return [
        (each["role"], each.get("content") or "", [call["function"] for call in each.get("tool_calls") or []])
        for each in messages
    ]


BOTH = {"ledger": Ledger, "doors": Doors}


@pytest.mark.parametrize(
    ("factory", "script", "rewards", "data"),
    [
        (Ledger, LEDGER, [totals], rows()),
        (Doors, DOORS, [], rows()),
        (BOTH, LEDGER, [totals], rows("doors", "ledger", "ledger", "ledger")),
    ],
    ids=["plain", "async", "by name"],
)
def test_messages_and_rewards_are_those_of_trl(tmp_path, factory, script, rewards, data):
    tokenizer = build_tokenizer()
    arguments = model_of(tokenizer), list(rewards) or None, GRPOConfig(str(tmp_path / "trl"), **SHORT)
    given = {"processing_class": tokenizer, "environment_factory": factory, "train_dataset": data}
    trl = sample(Scripted(*arguments, script=script, **given))
    trainer = sample(ours(tmp_path / "ours", factory, script, data, rewards))
    assert trainer.reward_func_names == trl.reward_func_names
    torch.testing.assert_close(trainer.batch.rewards_per_func, trl.scored[2], equal_nan=True)
    for trajectory, prompt, completion in zip(trainer.batch.trajectories, *trl.scored[:2], strict=True):
        # TRL appends replies to the prompt that it rewards
        assert said(trajectory.prompt) == said(prompt[: len(trajectory.prompt)])
        mine, theirs = said(trajectory.completion), said(completion)
        assert mine == theirs or "unknown tool" in str(mine)  # ours names the tools that there are


def test_the_options_given_stay_as_they_were_and_count(tmp_path):
    """Weights are of the listed rewards only."""
    args = MTGRPOConfig(str(tmp_path), **SHORT, reward_weights=[2.0])
    before, first = {**vars(args)}, ours(tmp_path, Ledger, LEDGER, rows(), [totals])
    given = {"engine": first.runner.engine, "processing_class": first.processing_class, "train_dataset": rows()}
    model = model_of(first.processing_class)
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
        prompt = [{"role": "user", "content": " It begins at 1."}]
        assert sample(trainer).batch.trajectories[0].prompt == prompt


def test_a_class_may_be_the_only_reward_and_the_only_data(tmp_path):
    trainer = ours(tmp_path, Ledger, LEDGER, None)
    assert trainer.reward_func_names == ["Ledger"] and len(trainer.train_dataset) == 1
    trainer.train()
    assert trainer.state.global_step == 1
    assert trainer.runner.env.protocol.native_tools and len(trainer.env.pool) == 4


def test_recipes_name_factories_by_path(tmp_path):
    paths = {"ledger": "support.trl_environments.Ledger", "doors": "support.trl_environments:Doors"}
    data = rows("ledger", "doors")
    trainer = ours(tmp_path, None, DOORS, data, environment_factory=paths, tools=["calculator"])
    assert {name: type(env) for name, env in trainer.env.items()} == {"ledger": TRLEnv, "doors": TRLEnv}
    assert trainer.reward_func_names == ["Ledger", "Doors"]
    assert sorted(trainer.env["doors"].tools) == ["calculator", "unlock"]
    assert sample(trainer).batch.trajectories[1].rewards["outcome"] == {"Ledger": None, "Doors": 1.0}


def test_an_environment_among_others_may_be_a_factory(tmp_path):
    ledger = {"environment_factory": "support.trl_environments.Ledger", "max_env_steps": 5}
    environments = {"ledger": ledger, "tools": {"tools": ["calculator"]}}
    trainer = ours(tmp_path, None, LEDGER, rows("tools", "ledger"), environments=environments)
    assert trainer.env["ledger"].max_steps == 5 and trainer.env["ledger"].named
    assert sample(trainer).batch.trajectories[0].env_rewards == {"Ledger": 12.0}


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
TODAY = rows(date="today")


@pytest.mark.parametrize(
    ("factory", "data", "options", "problem"),
    [
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
        (Dated, TODAY, {"eval_dataset": rows()}, "needs `date`, which is no column of the evaluation dataset"),
        (Needy, rows(), {"rewards": [totals]}, "`reset` of the environment Needy needs `strat`.*nearest is 'start'"),
        (Silent, rows(), {}, "There is no reward"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path, caplog, factory, data, options, problem):
    with caplog.at_level(logging.WARNING), pytest.raises((ConfigError, ValueError), match=problem):
        ours(tmp_path, factory, LEDGER, data, **options)
    assert factory is not Silent or "The environment Silent has no tools" in caplog.text


def test_options_name_one_thing_that_answers(tmp_path):
    args = MTGRPOConfig(str(tmp_path), env="a.b")
    with pytest.raises(ConfigError, match="`env` and `environment_factory` both say who answers"):
        MTGRPOEnvTrainer("embedded", args=args, environment_factory=Ledger)


def test_an_environment_that_no_row_names_is_told(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        ours(tmp_path, {"a": Ledger, "b": Doors}, LEDGER, rows(environment="a"))
    assert "No row of the dataset names the environment 'b'" in caplog.text
