"""Two ranks with `sp_size`, and models and options that it refuses: `sequence_refusals OUTPUT_FILE`."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from datasets import Dataset

from mt_grpo.app.train import leave_group
from mt_grpo.errors import ConfigError
from support.architectures import build_random
from support.mixtures import build_mixture
from support.models import build_model, build_tokenizer
from support.trainers import Length, trainer_builder


def wrong_over_trees(tokenizer):
    """It looks at a token's place in the row, which trees change."""
    model = build_model(tokenizer)
    model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output + 0.01 * torch.arange(output.size(1))[:, None]
    )
    return model


def refuse(given: str) -> Accelerator:
    tokenizer, said, file = build_tokenizer(), {}, Path(given)
    cases = {
        "heads": (build_model(tokenizer, num_attention_heads=3, num_key_value_heads=1), {}),
        "attention of its own": (build_random("bloom", vocab_size=len(tokenizer)), {}),
        "balanced experts": (build_mixture("mixtral", len(tokenizer)), {"router_aux_loss_coef": 0.1}),
        "wrong over trees": (wrong_over_trees(tokenizer), {}),
        "three": (build_model(tokenizer), {"sp_size": 3}),
    }
    build = trainer_builder(file.parent / "run", tokenizer, Dataset.from_list([{"prompt": "What is Lima"}] * 8))
    for name, (model, options) in cases.items():
        options = {"max_steps": 1, "sp_size": 2, "advantage_estimator": None, **options}
        try:
            build(lambda session, turn: "<answer>Lima</answer>", model, ((), (Length(),)), **options).train()
        except ConfigError as error:
            said[name] = str(error)
    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        file.write_text(json.dumps(said))
    return accelerator


if __name__ == "__main__":
    leave_group(refuse(*sys.argv[1:]))
