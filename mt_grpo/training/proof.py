"""The proof of the probe, for the models of a trainer."""

from __future__ import annotations

from trl import GRPOTrainer

from mt_grpo.training.probe import prove


def prove_forward(trainer: GRPOTrainer, length: int) -> None:
    """
    Proves `forward: tree` for the policy as it is wrapped for training, and for the reference where it is a model of
    its own, once for rows of up to `length` tokens. Every rank calls it at the same point. In evaluation it does
    nothing.

    Raises:
        UnsupportedModelError: If a model scores packed trees otherwise than each turn alone.
    """
    if trainer.args.forward != "tree" or not trainer.model.training:
        return
    with trainer.accelerator.autocast():
        for model in filter(None, (trainer.model_wrapped, trainer.ref_model)):
            prove(
                model,
                length,
                attention=trainer.args.tree_attention,
                mixed_precision=trainer.accelerator.mixed_precision,
            )
