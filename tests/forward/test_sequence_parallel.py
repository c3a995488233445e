"""Several processes compute a packed row together, and find what one finds."""

from __future__ import annotations

from functools import partial

import pytest
from peft import LoraConfig, get_peft_model
from support.architectures import build_random
from support.forked import run_processes
from support.hybrids import build_hybrid
from support.images import build_processor, build_vision_model
from support.models import build_model

from mt_grpo.errors import UnsupportedModelError
from mt_grpo.forward.model import check_sequence_parallel


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_that_share_a_row_find_what_one_finds(tmp_path, processes):
    """Scores, losses and gradients, on random forked trees, for every kind of attention; see the script."""
    run_processes(["-m", "support.sequence_ranks", str(processes)], processes, tmp_path / "log", {})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *((partial(build_random, kind), "computes its attention itself") for kind in ("bloom", "mpt", "falcon")),
        *((partial(build_hybrid, kind), "whose state runs along the row") for kind in ("qwen3.5", "lfm2")),
        (lambda: build_vision_model(build_processor().tokenizer), "takes images"),
    ],
)
def test_a_model_whose_rows_cannot_be_shared_is_refused(make, words):
    with pytest.raises(UnsupportedModelError, match=f"{words}.*leave `sp_size` out"):
        check_sequence_parallel(make(), 2)


def test_heads_that_processes_cannot_share_are_refused(tokenizer):
    model = build_model(tokenizer, num_attention_heads=6, num_key_value_heads=2)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    for each in (model, adapted):
        check_sequence_parallel(each, 3)
        with pytest.raises(UnsupportedModelError, match="has 6 attention heads, which 4 .*to 2 or 3 or 6, or leave"):
            check_sequence_parallel(each, 4)
