"""The few metrics of a step that a script prints. The records and the trackers have all of them."""

from __future__ import annotations

from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback

PRINTED = (
    *("loss", "grad_norm", "learning_rate", "reward", "reward_std", "frac_reward_zero_std", "kl", "entropy"),
    *("completions/mean_length", "completions/clipped_ratio", "tools/call_frequency", "tools/failure_frequency"),
    *("turns/mean", "num_tokens", "step_time", "runtime", "epoch"),
)


def printed(logs: dict[str, Any]) -> dict[str, Any]:
    """Those of `PRINTED`, the mean of each reward, and what is logged at the end of training."""

    def few(name: str) -> bool:
        return name in PRINTED or (name.startswith("rewards/") and name.endswith("/mean"))

    def of_evaluation(name: str) -> bool:
        bare = name.removeprefix("eval_")  # what follows may begin with the name of one of several sets
        return bare != name and (few(bare) or any(bare.endswith(f"_{one}") for one in PRINTED))

    return {
        name: value for name, value in logs.items() if few(name) or of_evaluation(name) or name.startswith("train_")
    }


class FewerProgress(ProgressCallback):
    """Prints beside a bar."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, printed(logs or {}), **kwargs)


class FewerPrinter(PrinterCallback):
    """Prints without a bar."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, printed(logs or {}), **kwargs)


def print_fewer(callbacks: list[TrainerCallback]) -> None:
    """Puts them in the place of those of transformers."""
    fewer = {ProgressCallback: FewerProgress, PrinterCallback: FewerPrinter}
    for place, callback in enumerate(callbacks):
        if type(callback) in fewer:
            callbacks[place] = fewer[type(callback)]()
