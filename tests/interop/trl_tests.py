"""
TRL's own tests of its trainer, with our classes in the place of its classes: `make interop-trl TRL=path/to/a/clone`,
or `python tests/interop/trl_tests.py path/to/a/clone [pytest's options]`.

Nothing is fetched. Random models and a small data set stand in for those of `trl-internal-testing`, and an engine
gives the answers that a test lets a replaced `model.generate` return. docs/trl.md says what fails, and why.
"""

from __future__ import annotations

import ast
import copy
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import datasets
import torch
import transformers
import trl

sys.path.append(str(Path(__file__).parents[1]))

from support.conversations import template_tokenizer
from support.images import build_processor, build_vision_model, picture
from support.vision import VISION_FAMILIES

import mt_grpo.training.trainer
from mt_grpo.rollout import Sample
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer

HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {"hidden_size": 8, "intermediate_size": 32, "max_position_embeddings": 32768, **HEADS}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 4, "mamba_n_groups": 1, "ssm_state_size": 16, "mamba_expand": 2}
NEMOTRON = {"hidden_size": 16, "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 32, **EXPERTS, **MAMBA}
REMOTE = """from transformers import LlamaConfig, LlamaForCausalLM

class RemoteConfig(LlamaConfig):
    model_type = "remote"

class RemoteForCausalLM(LlamaForCausalLM):
    config_class = RemoteConfig
"""
MODELS = {
    "Qwen2ForCausalLM-2.5": ("qwen2_5", {}),
    "Qwen3ForCausalLM": ("qwen3", {"head_dim": 8}),
    "Qwen3MoeForCausalLM": ("qwen3", {"head_dim": 8, "num_experts": 4, "router_aux_loss_coef": 0.0, **EXPERTS}),
    "LlamaForCausalLM-3.2": ("llama3_2", {}),
    "RemoteForCausalLM": ("llama3_2", {}),
    "MistralForCausalLM-0.2": ("qwen3", {}),
    "Gemma2ForCausalLM": ("gemma", {"head_dim": 8}),
    "Cohere2ForCausalLM": ("cohere2", {"logit_scale": 1.0}),
    "GptOssForCausalLM": ("gptoss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Glm4MoeForCausalLM": ("glm4moe", {"head_dim": 8, "n_routed_experts": 4, "first_k_dense_replace": 1, **EXPERTS}),
    "NemotronHForCausalLM-nano": ("qwen3", {"layers_block_type": ["mamba", "attention", "moe"], **NEMOTRON}),
    "Qwen2ForSequenceClassification-2.5": ("qwen2_5", {"num_labels": 1}),
    "Qwen3ForSequenceClassification": ("qwen3", {"head_dim": 8, "num_labels": 1}),
    "LlamaForSequenceClassification-3.2": ("llama3_2", {"num_labels": 1}),
}
"""The template of TRL's that a stand-in speaks, and what its configuration has beside `SIZES`."""

LONG = {"max_position_embeddings": 32768}


def _qwen(template: str, family: str, **decoder: object):
    processor = build_processor(template)
    return processor, build_vision_model(processor.tokenizer, family=family, **LONG, **decoder)


VISION_MODELS = {
    "Gemma3ForConditionalGeneration": VISION_FAMILIES["gemma 3"][0],
    "Gemma4ForConditionalGeneration": VISION_FAMILIES["gemma 4 e2b"][0],
    "LlavaNextForConditionalGeneration": VISION_FAMILIES["llava-next"][0],
    "Qwen2VLForConditionalGeneration": lambda: _qwen("qwen2_5_vl", "qwen2_vl"),
    "Qwen2_5_VLForConditionalGeneration": lambda: _qwen("qwen2_5_vl", "qwen2_5_vl"),
    "Qwen3_5ForConditionalGeneration-NoThink": lambda: _qwen("qwen3_5_nothink", "qwen3_5"),
    "Qwen3_5MoeForConditionalGeneration-3.6": lambda: _qwen("qwen3_6", "qwen3_5_moe", router_aux_loss_coef=0.0),
}
"""What makes the processor and the model of a stand-in that sees."""

PROMPTS = """Beautiful is better than|Explicit is|Simple is better|Complex|Flat is better than|Sparse is better
Readability|Special cases aren't special|Although practicality beats|Errors should never|Unless explicitly
In the face of ambiguity, refuse|There should be one-- and preferably|Although that way may not be obvious
Now is better|Although never is often|If the implementation is hard to explain, it's a bad"""
"""Those that its tests name, in their order; 17 as in its data set, since tests count the steps of an epoch."""


def snapshot_of(name: str, hub: Path) -> Path:
    folder = hub / f"models--trl-internal-testing--tiny-{name}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    return folder / "snapshots" / ("0" * 40)


def make_model(name: str, snapshot: Path) -> None:
    template, more = MODELS[name]
    tokenizer = copy.deepcopy(template_tokenizer(template))
    if name == "Qwen2ForCausalLM-2.5":  # one of few tokens ends an answer of 8 where a test expects that it does not
        tokenizer.add_tokens([f"<{number}>" for number in range(20_000)])
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    kind = name.split("-")[0]
    config_name = "LlamaConfig" if kind.startswith("Remote") else f"{kind.split('For')[0]}Config"
    config = getattr(transformers, config_name)(vocab_size=len(tokenizer), **special, **{**SIZES, **more})
    torch.manual_seed(0)
    model = getattr(transformers, kind.replace("Remote", "Llama"))(config).float()
    model.save_pretrained(snapshot)
    tokenizer.save_pretrained(snapshot)
    if kind.startswith("Remote"):
        classes = {"AutoConfig": "remote.RemoteConfig", "AutoModelForCausalLM": "remote.RemoteForCausalLM"}
        written = json.loads((snapshot / "config.json").read_text())
        written |= {"model_type": "remote", "architectures": [kind], "auto_map": classes}
        (snapshot / "config.json").write_text(json.dumps(written))
        (snapshot / "remote.py").write_text(REMOTE)


def load_dataset(path: str, name: str | None = None, split: str | None = None, streaming: bool = False):
    """Rows in the place of those of `trl-internal-testing`."""
    if split is None:
        return datasets.DatasetDict({each: load_dataset(path, name, each) for each in ("train", "test")})
    texts = re.split(r"[|\n]", PROMPTS)[: 17 if split == "train" else 2]
    talk = "conversational" in (name or "")
    rows = [{"prompt": [{"role": "user", "content": text}] if talk else text} for text in texts]
    if "image" in path:
        image = picture(size=(32, 32))
        column = {"images": [image] * 2} if "multi" in path else {"image": image}
        rows = [{**row, **column} for row in rows]
    loaded = datasets.Dataset.from_list(rows)
    return loaded.to_iterable_dataset() if streaming else loaded


def load_processor(name: str, *args, **options):
    """That of a stand-in which sees. Its files would need torchvision, for videos."""
    make = VISION_MODELS.get(str(name).removeprefix("trl-internal-testing/tiny-"))
    if make is None:
        return OWN_PROCESSOR(name, *args, **options)
    processor, _ = make()
    for side in ("padding_side", "truncation_side"):
        setattr(processor.tokenizer, side, options.get(side, "right"))
    return processor


def texts_of_ids(source: str) -> dict[tuple[int, ...], str]:
    """What the rows of token ids in TRL's tests say, by the comments beside them: the ids are of Qwen's tokenizers."""
    found, text = {}, None
    for line in map(str.strip, source.splitlines()):
        if comment := re.match(r"""# (['"].*['"])( \+ pad(ding)?)?$""", line) or re.match(
            r"""\[.*\],\s+# (['"].*['"])""", line
        ):
            text = ast.literal_eval(comment.group(1))
        if (row := re.match(r"\[([\d, ]+)\],", line)) and text:
            found[tuple(int(each) for each in row.group(1).split(",") if int(each) not in PADDING)] = text
    return found


class ReplacedGenerate:
    """An engine that asks the `model.generate` that a test has replaced, else the model."""

    def __init__(self, own, args, tokenizer, model) -> None:
        self.own, self.args, self.tokenizer, self.model, self.turns = own, args, tokenizer, model, {}

    def __getattr__(self, name: str):
        return getattr(self.own, name)

    async def generate(self, *request):
        is_own = not isinstance(vars(self.model).get("generate"), Mock)
        return await self.own.generate(*request) if is_own else self.replaced(*request[-2:])

    async def generate_with_media(self, *request):
        is_own = not isinstance(vars(self.model).get("generate"), Mock)
        return await self.own.generate_with_media(*request) if is_own else self.replaced(*request[-2:])

    def replaced(self, sampling, session) -> Sample:
        turn = self.turns[session] = self.turns.get(session, -1) + 1
        size = min(self.args.generation_batch_size, 4)
        size = size if turn == 0 else (size + 1) // 2  # so many call a tool in those tests: two of three, one of two
        rows = self.model.generate(input_ids=torch.zeros(size, 1, dtype=torch.long))[:, 1:].tolist()
        ids = tuple(each for each in rows[int(session.rsplit("-", 1)[1]) % len(rows)] if each not in PADDING)
        text = TEXTS[ids].removesuffix("<|im_end|>") + "<|im_end|>" * (not ENDS.isdisjoint(ids))
        sampled = self.tokenizer.encode(text, add_special_tokens=False)[: sampling.max_tokens]
        return Sample(sampled, [-1.0] * len(sampled), "stop")


class Config(MTGRPOConfig):
    """With TRL's default of `logging_steps`, and the room that answers of the stand-ins' tokenizers take."""

    def __init__(self, *args, **options) -> None:
        options.setdefault("logging_steps", 10)
        if re.search("tools|tool_calls|environment", os.environ["PYTEST_CURRENT_TEST"]):
            options["max_completion_length"] = 400
        super().__init__(*args, **options)


TEXTS: dict[tuple[int, ...], str] = {}
PADDING, ENDS = {151643, 248044}, {151645, 248046}
"""Ids of Qwen3's tokenizer, and of Qwen3.5's."""
OWN_PROCESSOR = transformers.AutoProcessor.from_pretrained


def pytest_configure(config) -> None:
    """Puts the stand-ins in their places, before the tests are imported."""
    clone = Path(os.environ["TRL_CLONE"])
    TEXTS.update(texts_of_ids((clone / "tests" / "test_grpo_trainer.py").read_text()))
    found = vars(importlib.import_module("trl.import_utils"))
    for name in re.findall(r"is_\w+_available", (clone / "tests" / "testing_utils.py").read_text()):
        found.setdefault(name, lambda *args: False)  # it is of another version
    own = mt_grpo.training.environment.own_engine
    mt_grpo.training.environment.own_engine = lambda args, tokenizer, model, accelerator: ReplacedGenerate(
        own(args, tokenizer, model, accelerator), args, tokenizer, accelerator.unwrap_model(model)
    )
    transformers.AutoProcessor.from_pretrained = load_processor
    datasets.load_dataset, trl.GRPOConfig, trl.GRPOTrainer = load_dataset, Config, MTGRPOEnvTrainer


def main(clone: Path, options: list[str]) -> int:
    with tempfile.TemporaryDirectory() as cache:
        hub = Path(cache) / "hub"
        for name in MODELS:
            make_model(name, snapshot_of(name, hub))
        for name, make in VISION_MODELS.items():
            make()[1].save_pretrained(snapshot_of(name, hub))
        paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "HF_HOME": cache, "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths, "TRL_CLONE": str(clone)}
        env["OMP_NUM_THREADS"] = "1"  # the models are tiny, and threads wait for one another
        file = clone / "tests" / "test_grpo_trainer.py"
        program = [sys.executable, *"-m pytest -q -p trl_tests -p no:cacheprovider".split()]
        return subprocess.run([*program, str(file), *options], env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
