"""What the benchmarks share: a tokenizer, the machine's description, the table and the JSON file."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mt_grpo.data import embedded

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("trl", "transformers", "torch", "numpy")


def build_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer of the embedded model."""
    return AutoTokenizer.from_pretrained(Path(embedded.__file__).parent / "model")


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def write(name: str, settings: dict[str, Any], rows: Any, **further: Any) -> None:
    """Writes `results/NAME.json`: the machine, settings, rows and whatever else was measured."""
    RESULTS.mkdir(exist_ok=True)
    where = machine() | ({"gpu": torch.cuda.get_device_name()} if settings.get("device") == "cuda" else {})
    content = {"machine": where, "settings": settings, "rows": rows, **further}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
