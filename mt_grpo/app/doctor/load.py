"""
What a training process holds, part by part. Apart from the plan that prints it, since advice asks it of other runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from mt_grpo.app.doctor.case import Case
from mt_grpo.app.doctor.memory import (
    PROCESS,
    RESERVE,
    Precision,
    Shape,
    Sharding,
    activations,
    gathered,
    head,
    states,
    weights,
)
from mt_grpo.app.doctor.time_plan import MOST_ROWS
from mt_grpo.forward.lm_head import CHUNK_ELEMENTS


@dataclass(frozen=True)
class Load:
    """What decides what a training process holds."""

    shape: Shape
    precision: Precision
    processes: int
    rows: int
    accumulation: int
    prompt: int
    completion: int
    context: int
    checkpointing: bool
    chunk: int | None
    reference: bool
    under_way: int
    copied: bool
    on_gpu: bool
    sharing: int
    group: int = 1
    offloading: bool = False

    @classmethod
    def of(cls, case: Case) -> Load:
        args = case.args
        return cls(
            case.shape,
            case.precision,
            case.processes,
            args.per_device_train_batch_size,
            args.gradient_accumulation_steps,
            case.prompt,
            args.max_completion_length,
            case.context,
            bool(args.gradient_checkpointing),
            CHUNK_ELEMENTS["cuda" if case.on_gpu else "cpu"] if args.forward != "padded" else None,
            args.beta > 0,
            0 if args.use_vllm else case.under_way,
            bool(args.max_staleness) and not args.use_vllm,
            case.on_gpu,
            args.sp_size,
            args.gradient_checkpointing_layers,
            args.activation_offloading,
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation."""
        return min(self.context, self.prompt + self.completion)

    def parts(self, sharding: Sharding) -> dict[str, float]:
        """Bytes of what one training process holds at its highest, in the worst micro-batch."""
        shape, precision, ranks = self.shape, self.precision, self.processes
        whole = self.rows * self.longest, self.rows * min(self.completion, self.longest)
        tokens, trained = (-(-number // self.sharing) for number in whole)
        checkpointing = self.checkpointing or sharding.checkpoints
        training = activations(shape, tokens, precision.compute, checkpointing, self.group, self.offloading)
        logits = head(shape, trained, precision.compute, self.chunk)
        found = {"states": states(shape, precision, sharding, ranks), "activations": training, "logits": logits}
        if sharding.stage == 3:
            found["gathered layers"] = gathered(shape, precision, sharding)
        if self.reference and not shape.adapter:
            held = weights(shape, precision)
            found["reference model"] = held / ranks if sharding.stage == 3 else held
        rows = min(-(-self.under_way // ranks), MOST_ROWS)
        cache = float(rows * self.longest * shape.kv_bytes(precision.compute))
        if self.copied:
            found["copy that samples"] = weights(shape, precision) + cache
        elif self.under_way:  # it samples before it trains, so the larger of the two counts
            found["sampling beyond training"] = max(0.0, cache - training - logits)
        found["CUDA and gaps" if self.on_gpu else "Python"] = RESERVE if self.on_gpu else PROCESS
        return found

    def needs(self, sharding: Sharding) -> float:
        """Their sum."""
        return sum(self.parts(sharding).values())
