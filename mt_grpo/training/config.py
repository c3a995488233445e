"""The options of a run: TRL's `GRPOConfig` plus what a multi-turn agent needs."""

from __future__ import annotations

import copy
import functools
import os
from dataclasses import MISSING, dataclass, fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from accelerate import PartialState
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available
from trl import GRPOConfig

from mt_grpo.credit import ADVANTAGE_ESTIMATORS, Rule, bind_rule, rule_name, splits_turns
from mt_grpo.envs.protocols import PROTOCOLS
from mt_grpo.errors import ConfigError
from mt_grpo.forward.attention import KERNELS
from mt_grpo.imports import import_file
from mt_grpo.options.rules import check_options
from mt_grpo.options.table import OF_LIBRARIES, RunOptions, options_of, with_options_in_docstring
from mt_grpo.options.values import PARSERS, chosen_rule, with_env_options
from mt_grpo.rollout.runner import Branching

KEEPS_TURNS = ("cispo", "vespo")
"""Loss types in which an advantage weighs its own tokens, for every `importance_sampling_level`."""

_CLIP_OF_TRL: float = GRPOConfig.__dataclass_fields__["vllm_importance_sampling_clip_max"].default

CLIP = 2.0
"""Where the ratio of a token is cut with `max_staleness`, unless another bound than TRL's default is given."""


def registered_names(weight_sync: str | None = None) -> dict[str, list[str]]:
    """The values of options to which plugins can add; transports are loaded unless `weight_sync` is `auto`."""
    transports = []
    if weight_sync != "auto":
        from mt_grpo.weights.transport import TRANSPORTS

        transports = list(TRANSPORTS)
    return {
        "weight_sync": ["auto", *transports],
        "tree_attention": ["auto", *KERNELS],
        "call_protocol": list(PROTOCOLS),
        "advantage_estimator": list(ADVANTAGE_ESTIMATORS),
    }


def has_bfloat16() -> bool:
    """Whether there is a GPU, or the like, that computes in bfloat16."""
    return is_torch_bf16_gpu_available() or is_torch_xla_available()


def changed(args: GRPOConfig, **values: Any) -> Any:
    """A copy of options with other values for some. What TRL fills in stays as it is."""
    args = copy.copy(args)
    args.__dict__.update(values)
    return args


@functools.cache
def _never_none() -> set[str]:
    """Options that always have a value. TRL's parser changes the types that the fields themselves name."""
    hints = get_type_hints(MTGRPOConfig)
    return {name for name in options_of(MTGRPOConfig) if NoneType not in get_args(hints[name])}


@with_options_in_docstring
@dataclass
class MTGRPOConfig(RunOptions, GRPOConfig):
    """Configuration of `MTGRPOEnvTrainer`. TRL's fields keep their meaning, but for those that are listed here."""

    def __post_init__(self) -> None:
        given = self.__dict__
        given.update(with_env_options(given))
        ours = options_of(type(self))
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name in _never_none():
                raise ConfigError(f"`{field.name}` cannot be None: leave it out, or give a value.")
            if isinstance(value, str) and field.name in ours and str(field.type).startswith("list[str]"):
                given[field.name] = [value]  # a recipe may give one name without a list
        for plugin in self.external_plugins or []:
            import_file(plugin)
        for name, parse in PARSERS.items():
            if given[name] is not None:
                given[name] = parse(given[name])
        if self.vllm_importance_sampling_mode is None:
            prefetches = bool(self.max_staleness)
            self.vllm_importance_sampling_mode = "token_truncate" if prefetches else "sequence_mask"
            if prefetches and given["vllm_importance_sampling_clip_max"] == _CLIP_OF_TRL:
                given["vllm_importance_sampling_clip_max"] = CLIP
        if self.greater_is_better is None and str(self.metric_for_best_model).endswith("reverse_kl"):
            given["greater_is_better"] = False  # transformers knows losses alone
        self.check()
        if given["bf16"] is None:
            given["bf16"] = not self.fp16 and not self.use_cpu and has_bfloat16()
        if self.use_cpu and int(os.environ.get("WORLD_SIZE", 1)) > 1:  # transformers sets it on GPUs only
            PartialState(cpu=True, backend=self.ddp_backend, timeout=self.ddp_timeout_delta)
        self._fill_in()
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False  # torch warns, since there is nothing to pin it for
        self.check_credit(bool(self.turn_reward_funcs))

    def _fill_in(self) -> None:
        """
        Takes over what TRL and transformers fill in. They do it on a copy that passes their checks of whole groups,
        bfloat16 and processes: a recipe for eight GPUs is also served and read by one process, and on a machine
        without any.
        `mt_grpo.training.preflight` checks both where training starts. The copy has the true batch size of a device,
        since DeepSpeed's options are held against it.
        """
        group, eval_group = self.num_generations, self.num_generations_eval or self.num_generations
        size, steps = self.generation_batch_size, self.steps_per_generation
        alone = "LOCAL_RANK" not in os.environ and int(os.environ.get("WORLD_SIZE", 1)) == 1
        theirs = changed(
            self,
            ddp_backend=None if alone else self.ddp_backend,  # else accelerate looks for the others
            bf16=self.bf16 and (self.use_cpu or has_bfloat16()),
            per_device_eval_batch_size=self.per_device_eval_batch_size * eval_group,
            generation_batch_size=None if steps is None else size,  # TRL refuses both
            steps_per_generation=(steps or self.gradient_accumulation_steps) * group,  # every group divides it
        )
        super(MTGRPOConfig, theirs).__post_init__()
        step = self.per_device_train_batch_size * theirs.world_size
        ours = {name: getattr(self, name) for name in ("bf16", "ddp_backend", "per_device_eval_batch_size")}
        ours["generation_batch_size"] = theirs.generation_batch_size // group if size is None else size
        ours["steps_per_generation"] = max(1, ours["generation_batch_size"] // step)
        self.__dict__.update(vars(theirs) | ours)

    @classmethod
    def of(cls, args: object) -> MTGRPOConfig:
        """Options as a `MTGRPOConfig`: a `GRPOConfig` with the defaults of all else, and every value that it has."""
        if isinstance(args, MTGRPOConfig):
            args.check()  # scripts set values after they made it
            return args
        if not isinstance(args, GRPOConfig):
            raise ConfigError(
                f"`args` is a {type(args).__name__}: give a `MTGRPOConfig`, or the `GRPOConfig` of a script for TRL's "
                "trainer."
            )
        # made without `__init__`: TRL has filled in fields that it would not take a second time
        whole = object.__new__(cls)
        for field in fields(cls):
            setattr(whole, field.name, field.default if field.default_factory is MISSING else field.default_factory())
        whole.__dict__.update(vars(args))
        if not args.use_vllm:
            whole.vllm_mode = "server"  # TRL's default says nothing where no server is used
        whole.check()
        return whole

    def check(self) -> None:
        """Holds the options against each other; TRL's `max_tool_calling_iterations` is taken as `max_env_steps`."""
        names = registered_names(self.weight_sync)
        if self.env is not None:  # its module, which is not imported yet, may register a protocol
            del names["call_protocol"]
        check_options(vars(self), names, OF_LIBRARIES | options_of(type(self)))
        if self.max_env_steps is None:
            self.max_env_steps = self.max_tool_calling_iterations

    @property
    def averages_turns(self) -> bool:
        """Whether the loss gives all tokens of a trajectory the mean of their advantages."""
        return self.importance_sampling_level == "sequence" and self.loss_type not in KEEPS_TURNS

    @property
    def replays_routes(self) -> bool:
        """Whether the forward replays the routes of a mixture that its engine gives."""
        return self.router_replay and self.forward == "tree"

    @property
    def given(self) -> dict[str, Any]:
        """Options that differ from their defaults, without what is secret in them."""
        known = self.to_dict()  # which hides tokens
        defaults = {field.name: field.default for field in fields(self) if field.default is not MISSING}
        return {
            name: known[name]
            for name, default in defaults.items()
            if known.get(name) is not None and known[name] != default and getattr(self, name) != default
        }

    def branching(self, mode: str) -> Branching | None:
        """How the conversations of a batch branch; `None` where they do not, as in an evaluation."""
        if self.branch_at is None or mode != "train":
            return None
        return Branching(self.branch_at, self.num_branches)

    @property
    def rule_options(self) -> dict[str, Any]:
        """Options of the run that a credit rule may take."""
        return {"turn_coef": self.turn_advantage_coef, "scale_rewards": self.scale_rewards}

    def credit_rule(self, has_turn_rewards: bool) -> Rule:
        """The rule that a trainer with or without turn rewards follows."""
        return chosen_rule(self.advantage_estimator, has_turn_rewards)

    def check_credit(self, has_turn_rewards: bool) -> None:
        """Looks up the credit rule, and refuses one that does not go with its options or with the loss."""
        rule = self.credit_rule(has_turn_rewards)
        bind_rule(rule, **self.rule_options)
        name = rule_name(rule)
        if self.averages_turns and splits_turns(name):
            another = ", choose another `loss_type`" if self.loss_type == "luspo" else ""
            raise ConfigError(
                "`importance_sampling_level: sequence` gives all tokens of a trajectory the mean of their advantages, "
                f"so the credit that `advantage_estimator: {name}` gives to single turns is lost: "
                f"leave it at `token`{another}, or choose a rule for whole trajectories such as `grpo_or` or "
                "`grpo_mr`."
            )
