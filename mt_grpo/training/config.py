"""The options of a run: TRL's `GRPOConfig` plus what a multi-turn agent needs."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import yaml
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available
from trl import GRPOConfig

from mt_grpo.agent_options import parse_agent, parse_env_config, parse_user
from mt_grpo.credit import ADVANTAGE_ESTIMATORS, bind_rule, parse_rule, rule_name, splits_turns
from mt_grpo.credit_options import check_rule
from mt_grpo.envs.protocols import PROTOCOLS
from mt_grpo.errors import ConfigError
from mt_grpo.forward.attention.layout import KERNELS
from mt_grpo.forward.logps import FORWARDS
from mt_grpo.imports import import_file
from mt_grpo.options import check_options
from mt_grpo.rollout.token_check import MODES
from mt_grpo.weights.transport import TRANSPORTS

KEEPS_TURNS = ("cispo", "vespo")
"""Loss types in which an advantage weighs its own tokens, for every `importance_sampling_level`."""


def registered_names() -> dict[str, list[str]]:
    """What can be named in the options whose value is a name, those of plugins that were imported among it."""
    return {
        "forward": list(FORWARDS),
        "weight_sync": ["auto", *TRANSPORTS],
        "tree_attention": ["auto", *KERNELS],
        "tokenization_sanity_check_mode": list(MODES),
        "call_protocol": list(PROTOCOLS),
        "advantage_estimator": list(ADVANTAGE_ESTIMATORS),
    }


def has_bfloat16() -> bool:
    """Whether there is a GPU, or the like, that computes in bfloat16."""
    return is_torch_bf16_gpu_available() or is_torch_xla_available()


def changed(args: GRPOConfig, **values: Any) -> Any:
    """A copy of options with other values for some. What TRL fills in stays as it is."""
    args = copy.copy(args)
    vars(args).update(values)
    return args


@dataclass
class MTGRPOConfig(GRPOConfig):
    """
    Configuration of `MTGRPOEnvTrainer`. TRL's own fields keep their meaning; `max_completion_length` bounds a whole
    trajectory (sampled and environment tokens after the prompt) and `reward_weights` is in the order turn rewards,
    then outcome rewards.

    Args:
        env (`str`, *optional*): Dotted path of an environment: a class, a `StepEnv`, or a function from a row to one;
            or `verifiers:NAME`, an environment of verifiers, which brings its own rows; `MultiTurnToolEnv` where none
            is given.
        env_config (`dict`, *optional*): Options of an environment of verifiers; see docs/any_agent.md.
        environment_factory (`str` or `dict`, *optional*): Dotted path of a factory in TRL's form, see `TRLEnv`; or a
            mapping of such paths, by the names in the dataset's column `environment`.
        agent (`str` or `dict`, *optional*): Anybody's agent, which asks the policy over HTTP as it would ask OpenAI:
            the dotted path of a function `solve(row, client)`, or `{command: ...}`, a program that runs once for each
            conversation; see docs/any_agent.md.
        environments (`dict`, *optional*): Several environments in one run, by the names in the dataset's column
            `environment`: each a dotted path, or a mapping of its own `env`, `env_config`, `environment_factory`,
            `agent`, `tools`, `system_prompt`, `simulated_user`, `interaction_config_file`, `max_env_steps`,
            `call_protocol`, `env_mask`, `tool_timeout`, `multi_turn_scheduler`, `max_turns` and `loss_scale`.
        simulated_user (`dict`, *optional*): A user whom an OpenAI-compatible endpoint plays: `base_url`, `model`,
            `system_prompt` and more, see `SimulatedUser`. It answers every turn without a tool call.
        interaction_config_file (`str`, *optional*): YAML file of verl's interactions, which answer every turn without
            a tool call, see `load_interactions`.
        multi_turn_scheduler (`str`, *optional*): A scheduler in the place of an environment, by name or dotted path,
            see `mt_grpo.integrations.swift`.
        max_turns (`int`, *optional*): Responses of one conversation of the scheduler; no bound of its own where unset.
        loss_scale (`str`, *optional*, defaults to `"all"`): Of a scheduler's responses train `"all"` or the
            `"last_round"`; it is a mask, and gives way to a `response_loss_mask`.
        tools (`list[str]`, *optional*): Tools by name or dotted path.
        tools_config_file (`str`, *optional*): YAML file of further tools, those of MCP servers among them, in verl's
            form; see `mt_grpo.tools.load_tools_file`.
        call_protocol (`str`, *optional*): `"tags"`, `"native"` (the model's own tool calls) or `"plain"` (no calls: a
            conversation is one answer). Where it is unset: `"tags"`, and for `environment_factory` `"native"`, as in
            TRL.
        external_plugins (`list[str]`, *optional*): Python files imported before anything is looked up by name.
        turn_reward_funcs (`list[str]`, *optional*): Turn rewards by name or dotted path; a class also by a mapping of
            its `name` or path and its options, as JSON on the command line.
        outcome_reward_funcs (`list[str]`, *optional*): Outcome rewards in the same form.
        state_score (`str`, *optional*): A `StateScore` by name or dotted path, the baseline of `state_baseline`.
        system_prompt (`str`, *optional*): Replaces the call protocol's instructions.
        max_env_steps (`int`, *optional*): Replies of the environment in one conversation; 5 where it is unset, for
            `environment_factory` no bound but the tokens, as in TRL. TRL's `max_tool_calling_iterations` is the same.
        max_turn_length (`int`, *optional*): Tokens sampled in one turn; no bound of its own where unset.
        env_mask (`int`, *optional*, defaults to `0`): Completion mask of tokens the environment wrote.
        turn_advantage_coef (`float`, *optional*): Weight of the turn advantage, the credit rule's `turn_coef`; the
            rule's default (1.0 for `mt_grpo`) where unset.
        advantage_estimator (`str` or `dict`, *optional*, defaults to `"mt_grpo"`): Credit rule, by its name in the
            registry, or a mapping of its `name` and options of its own; as JSON on the command line.
        groups_without_signal (`str`, *optional*, defaults to `"keep"`): What becomes of groups whose advantages are 0
            at every turn: `"keep"` (they count where the loss is divided), `"leave_out"` (they do not) or `"resample"`
            (their prompts are sampled again, and what then has no signal is left out).
        max_resample_times (`int`, *optional*, defaults to `3`): Rounds in which `groups_without_signal: resample`
            samples groups again, at most.
        branch_at (`int`, *optional*): Turns after which a conversation branches in training, see `docs/credit.md`; by
            default none does.
        num_branches (`int`, *optional*, defaults to `4`): Branches of a conversation, with `branch_at`; members of a
            group, as many conversations of which are branches of one.
        max_concurrent_rollouts (`int`, *optional*): Conversations under way at once; all where unset.
        tool_timeout (`float`, *optional*, defaults to `60.0`): Seconds one tool call may take, and an environment
            with a loop of its own between two turns.
        rollout_timeout (`float`, *optional*): Seconds one conversation may take; no bound where unset.
        bf16 (`bool`, *optional*): TRL's option; where it is unset, on if the run is on a GPU that computes in bfloat16
            and `fp16` is off.
        logging_steps (`float`, *optional*, defaults to `1`): TRL's option with another default: each step of many
            turns is worth a line of metrics.
        vllm_mode (`str`, *optional*, defaults to `"server"`): A dedicated server, started by `mt-grpo serve`, is the
            only mode.
        vllm_server_host (`str`, *optional*, defaults to `"127.0.0.1"`): Host on which the server listens.
        weight_sync (`str`, *optional*, defaults to `"auto"`): How weights reach a vLLM server: `"nccl"` (from GPU to
            GPU), `"safetensors"` (a file; what `"auto"` is) or `"lora"` (the adapter only).
        weight_sync_folder (`str`, *optional*): Folder of the file, shared between hosts; shared memory where unset.
        verify_sync_every (`int`, *optional*, defaults to `50`): The first sync, and then one in this many, is
            verified.
        history (`str`, *optional*, defaults to `"keep"`): What the model is shown of its past: `"keep"`,
            `"strip_thinking"`, `"compact"` or `"template"`, see `mt_grpo.rollout.history`.
        compact_every (`int`, *optional*): Turns between two compactions, for `history: compact`.
        tokenization_sanity_check_mode (`str`, *optional*, defaults to `"strict"`): How each trajectory is compared
            with its full rendering: `"strict"`, `"ignore_strippable"` or `"disable"`, see `SanityCheck`.
        forward (`str`, *optional*, defaults to `"tree"`): How log-probs are computed in training: `"tree"` (every
            token once, shared prefixes shared), `"padded"` (TRL's) or `"turn_by_turn"` (each turn alone, the oracle).
        disable_dropout (`bool`, *optional*, defaults to `True`): TRL's option with another default, since sampling has
            no dropout. With `False` it is in the loss, never in old and reference log-probs.
        tree_attention (`str`, *optional*, defaults to `"auto"`): Attention of the tree forward: `"auto"`, `"segment"`,
            `"flex"` or `"dense"`.
        overwrite_output_dir (`bool`, *optional*, defaults to `False`): Whether `mt-grpo train` removes what an earlier
            run left in `output_dir`, instead of refusing to begin there; it has no effect on a run that is resumed.
    """

    env: str | None = field(
        default=None, metadata={"help": "Dotted path of an environment class or factory, or `verifiers:NAME`."}
    )
    env_config: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of an environment of verifiers; JSON on the command line."}
    )
    environment_factory: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Dotted path of a factory in TRL's form, or a mapping of them by name."}
    )
    agent: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "An agent of any kind: the path of a function, or a mapping of `command`."},
    )
    environments: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Several environments, by the names in the column `environment`; JSON on the command line."},
    )
    simulated_user: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "A user whom an endpoint plays: its `base_url`, `model`, `system_prompt` and more; or JSON."
        },
    )
    interaction_config_file: str | None = field(
        default=None, metadata={"help": "YAML file of interactions, which answer turns without a tool call."}
    )
    multi_turn_scheduler: str | None = field(
        default=None, metadata={"help": "A scheduler in the place of an environment, by name or dotted path."}
    )
    max_turns: int | None = field(default=None, metadata={"help": "Responses of one conversation of the scheduler."})
    loss_scale: str = field(
        default="all", metadata={"help": "'all' or 'last_round': which of a scheduler's responses are trained."}
    )
    tools: list[str] | None = field(default=None, metadata={"help": "Tools by name or dotted path."})
    tools_config_file: str | None = field(default=None, metadata={"help": "YAML file of further tools."})
    call_protocol: str | None = field(
        default=None, metadata={"help": "How the model calls tools: 'tags' (the usual), 'native' or another by name."}
    )
    external_plugins: list[str] | None = field(
        default=None, metadata={"help": "Python files imported before anything is looked up by name."}
    )
    turn_reward_funcs: list[str] | None = field(
        default=None, metadata={"help": "Turn rewards by name or dotted path."}
    )
    outcome_reward_funcs: list[str] | None = field(
        default=None, metadata={"help": "Outcome rewards by name or dotted path."}
    )
    state_score: str | None = field(
        default=None, metadata={"help": "State score by name or dotted path, for the rule `state_baseline`."}
    )
    system_prompt: str | None = field(default=None, metadata={"help": "Replaces the call protocol's instructions."})
    max_env_steps: int | None = field(
        default=None, metadata={"help": "Replies of the environment in one conversation; 5 where unset."}
    )
    max_turn_length: int | None = field(default=None, metadata={"help": "Tokens sampled in one turn."})
    env_mask: int = field(default=0, metadata={"help": "Completion mask of tokens the environment wrote."})
    turn_advantage_coef: float | None = field(default=None, metadata={"help": "Weight of the turn advantage."})
    # `None` is refused; without it transformers' parser would take a mapping only
    advantage_estimator: dict[str, Any] | str | None = field(
        default="mt_grpo", metadata={"help": "Credit rule: its name, or JSON of its `name` and its options."}
    )
    groups_without_signal: str = field(
        default="keep",
        metadata={"help": "'keep', 'resample' or 'leave_out' groups whose advantages are all 0."},
    )
    max_resample_times: int = field(
        default=3, metadata={"help": "Rounds in which groups without signal are sampled again, at most."}
    )
    branch_at: int | None = field(
        default=None, metadata={"help": "Turns after which a conversation branches; none does where unset."}
    )
    num_branches: int = field(default=4, metadata={"help": "Branches of a conversation, with `branch_at`."})
    max_concurrent_rollouts: int | None = field(
        default=None, metadata={"help": "Conversations under way at once; all where unset."}
    )
    tool_timeout: float | None = field(default=60.0, metadata={"help": "Seconds one tool call may take."})
    rollout_timeout: float | None = field(default=None, metadata={"help": "Seconds one conversation may take."})

    logging_steps: float = field(
        default=1, metadata={"help": "Steps between two lines of metrics; below 1, a share of all steps."}
    )
    disable_dropout: bool = field(
        default=True, metadata={"help": "No dropout in training, an adapter's included; sampling has none either."}
    )
    vllm_mode: str = field(default="server", metadata={"help": "A dedicated server is the only mode."})
    vllm_server_host: str = field(default="127.0.0.1", metadata={"help": "Host of the vLLM server."})
    weight_sync: str = field(default="auto", metadata={"help": "'auto', or the name of a weight transport."})
    weight_sync_folder: str | None = field(default=None, metadata={"help": "Folder shared with the vLLM server."})
    verify_sync_every: int = field(default=50, metadata={"help": "Every so many weight syncs are verified."})
    history: str = field(
        default="keep", metadata={"help": "'keep', 'strip_thinking', 'compact' or 'template': what stays of the past."}
    )
    compact_every: int | None = field(default=None, metadata={"help": "Turns between two compactions."})
    tokenization_sanity_check_mode: str = field(
        default="strict", metadata={"help": "'strict', 'ignore_strippable' or 'disable'."}
    )
    forward: str = field(
        default="tree",
        metadata={"help": "'tree' (every token once), 'padded' (TRL's) or 'turn_by_turn' (the oracle)."},
    )
    tree_attention: str = field(default="auto", metadata={"help": "'auto', or the name of an attention kernel."})
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Remove what an earlier run left in `output_dir`."}
    )

    def __post_init__(self) -> None:
        for name in ("tools", "external_plugins", "turn_reward_funcs", "outcome_reward_funcs"):
            if isinstance(getattr(self, name), str):  # a recipe may give one name without a list
                setattr(self, name, [getattr(self, name)])
        for plugin in self.external_plugins or []:
            import_file(plugin)
        if isinstance(self.environments, str):  # of the command line
            self.environments = yaml.safe_load(self.environments)
        if isinstance(self.environment_factory, str) and self.environment_factory.lstrip().startswith("{"):
            self.environment_factory = yaml.safe_load(self.environment_factory)
        if self.agent is not None:
            self.agent = parse_agent(self.agent)
        if self.env_config is not None:
            self.env_config = parse_env_config(self.env_config)
        if self.simulated_user is not None:
            self.simulated_user = parse_user(self.simulated_user)
        self.advantage_estimator = parse_rule(self.advantage_estimator)
        self.check()
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and has_bfloat16()
        self._fill_in()
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False  # torch warns, since there is nothing to pin it for
        self.check_credit()

    def _fill_in(self) -> None:
        """
        Takes over what TRL and transformers fill in. They do it on a copy that passes their checks of batch sizes and
        of bfloat16: a recipe for eight GPUs is also served and read by one process, and on a machine without any.
        `mt_grpo.training.preflight` checks both where training starts.
        """
        group, eval_group = self.num_generations, self.num_generations_eval or self.num_generations
        theirs = changed(
            self,
            bf16=self.bf16 and (self.use_cpu or has_bfloat16()),
            per_device_train_batch_size=self.per_device_train_batch_size * group,  # a batch that every group divides
            per_device_eval_batch_size=self.per_device_eval_batch_size * eval_group,
            generation_batch_size=self.generation_batch_size and self.generation_batch_size * group,
        )
        super(MTGRPOConfig, theirs).__post_init__()
        ours = {name: getattr(self, name) for name in ("bf16", "per_device_train_batch_size")}
        ours["per_device_eval_batch_size"] = self.per_device_eval_batch_size
        ours["generation_batch_size"] = theirs.generation_batch_size // group
        vars(self).update(vars(theirs) | ours)

    def check(self) -> None:
        """
        Holds the options against each other. TRL's `max_tool_calling_iterations` is taken as `max_env_steps`.

        Raises:
            ConfigError: For the first rule that they break.
        """
        names = registered_names()
        if self.env is not None:  # its module, which is not imported yet, may register a protocol
            del names["call_protocol"]
        check_options(vars(self), names)
        if self.max_env_steps is None:
            self.max_env_steps = self.max_tool_calling_iterations

    def check_credit(self) -> None:
        """
        Looks up the credit rule, and checks it against its options and the loss.

        Raises:
            ConfigError: If there is no such rule, it does not take its options or lacks its state score, or the loss
                takes away the credit that it gives to turns.
        """
        bind_rule(self.advantage_estimator, turn_coef=self.turn_advantage_coef, scale_rewards=self.scale_rewards)
        name = rule_name(self.advantage_estimator)
        check_rule(vars(self), name)
        lost = self.importance_sampling_level == "sequence" and self.loss_type not in KEEPS_TURNS
        if lost and splits_turns(name):
            another = ", choose another `loss_type`" if self.loss_type == "luspo" else ""
            raise ConfigError(
                "`importance_sampling_level: sequence` gives all tokens of a trajectory the mean of their advantages, "
                f"so the credit that `advantage_estimator: {name}` gives to single turns is lost: "
                f"leave it at `token`{another}, or choose a rule for whole trajectories such as `grpo_or` or "
                "`grpo_mr`."
            )
