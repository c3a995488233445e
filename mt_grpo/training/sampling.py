"""Makes training compute the distribution that is sampled from, as far as it can follow the options."""

from __future__ import annotations

import logging

from accelerate import PartialState

from mt_grpo.errors import ConfigError
from mt_grpo.forward.lm_head import Truncation
from mt_grpo.rollout import SamplingParams
from mt_grpo.training.config import MTGRPOConfig

logger = logging.getLogger(__name__)


def read_truncation(args: MTGRPOConfig) -> Truncation | None:
    """The truncation that a run samples with; `None` if there is none."""
    truncation = Truncation(max(args.top_k or 0, 0), _top_p(args), args.min_p or 0.0)
    return None if truncation == Truncation() else truncation


def _top_p(args: MTGRPOConfig) -> float:
    return 1.0 if args.top_p is None else args.top_p  # as in TRL, `None` keeps all


def sampling_params(args: MTGRPOConfig) -> SamplingParams:
    """The sampling options of a run."""
    return SamplingParams(
        temperature=args.temperature,
        top_p=_top_p(args),
        top_k=args.top_k or 0,
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
    )


def inexact_options(args: MTGRPOConfig) -> list[str]:
    """Options, as `name: value`, that change what is sampled, and that the log-probs of training do not follow."""
    names = ["repetition_penalty"] if args.repetition_penalty != 1 else []
    if args.forward == "padded":  # TRL's own forward, which knows of temperature only
        chosen = vars(read_truncation(args) or Truncation())
        names += [name for name, value in chosen.items() if value != vars(Truncation())[name]]
    return [f"`{name}: {getattr(args, name)}`" for name in names]


def trained_truncation(args: MTGRPOConfig) -> Truncation | None:
    """As `read_truncation`. Warns if training computes the log-probs of another distribution nevertheless."""
    truncation, inexact = read_truncation(args), inexact_options(args)
    if inexact and PartialState().is_main_process:
        logger.warning(
            "%s changes what is sampled, but not the log-probs that are trained, so ratios and gradients are biased: "
            "%s.",
            " with ".join(inexact),
            _mend(inexact),
        )
    return truncation


def check_sequence_ratio(args: MTGRPOConfig) -> None:
    """
    Refuses ratios of whole trajectories between two different distributions, which vanish over many tokens.

    Raises:
        ConfigError: If `vllm_importance_sampling_mode` is one of `sequence_*` and training cannot follow the sampling.
    """
    inexact = inexact_options(args)
    mode = args.vllm_importance_sampling_mode
    if inexact and args.vllm_importance_sampling_correction and mode.startswith("sequence"):
        raise ConfigError(
            f"{' with '.join(inexact)} changes what is sampled, but not the log-probs that are trained, and "
            f"`vllm_importance_sampling_mode: {mode}` multiplies the difference over all tokens of a trajectory: "
            f"{_mend(inexact)}, or set `vllm_importance_sampling_mode: token_truncate`."
        )


def _mend(inexact: list[str]) -> str:
    if any("repetition_penalty" in option for option in inexact):
        return "leave it out" if len(inexact) == 1 else "leave them out"
    return "set `forward: tree`, or leave it out" if len(inexact) == 1 else "set `forward: tree`, or leave them out"
