"""What options may say together, asked of the configuration of a trainer."""

from __future__ import annotations

import pytest

from mt_grpo.errors import ConfigError
from mt_grpo.options import check_trainable
from mt_grpo.training import MTGRPOConfig

WRONG = [
    ({"loss_type": "grpoo"}, "`loss_type` is 'grpoo'; the nearest is 'grpo': choose one of grpo, bnpo, "),
    ({"scale_rewards": "groups"}, "`scale_rewards` is 'groups'; the nearest is 'group': choose one of group, batch, "),
    ({"max_env_steps": -1}, "`max_env_steps` is -1; it counts replies of the environment, so set 0 or more."),
    ({"env_mask": 2}, "`env_mask` is 2; set 0 "),
    ({"temperature": -0.5}, "`temperature` is -0.5; set a number above 0"),
    (
        {"max_turn_length": 513},
        "`max_turn_length: 513` is above `max_completion_length: 512`, the tokens of all turns together and of what "
        "the environment replies: lower the first, or raise the second.",
    ),
    ({"rollout_timeout": 0.0}, "`rollout_timeout` is 0.0; set a number above 0, or leave it out."),
    (
        {"call_protocol": "nativ"},
        "`call_protocol` is 'nativ'; the nearest is 'native': choose one of native, plain, tags.",
    ),
    ({"forward": "trees"}, "`forward` is 'trees'; the nearest is 'tree': choose one of tree, padded, turn_by_turn."),
    ({"history": "keeps"}, "`history` is 'keeps'; the nearest is 'keep': choose one of keep, strip_thinking, "),
    ({"history": "compact"}, "`history: compact` needs `compact_every`"),
    ({"history": "template", "forward": "padded"}, "`history: template` rewrites the past"),
    ({"use_vllm": True, "vllm_mode": "colocate"}, "`vllm_mode: colocate` is not supported"),
]


def config(tmp_path, **options):
    return MTGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **options)


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_options_that_contradict_each_other_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, **options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "options",
    [
        {"max_turn_length": 512},
        {"max_turn_length": 600, "max_completion_length": None},
        {"scale_rewards": False},
        {"temperature": 0.0},
        {"max_env_steps": 0},
        {"env": "my_env.py:Env", "call_protocol": "of_my_env"},
    ],
)
def test_what_stands_at_a_bound_is_taken(tmp_path, options):
    config(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "`temperature: 0.0` cannot be trained"),
        ({"max_steps": 0}, "`max_steps` is 0, so nothing is trained"),
        ({"num_train_epochs": 0.0}, "`num_train_epochs` is 0.0, so nothing is trained"),
    ],
)
def test_training_needs_more_than_a_rollout(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        check_trainable(vars(config(tmp_path, **options)))
