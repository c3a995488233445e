"""A model that a real vLLM server holds: sampled there, trained from there, and compared with what the server says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from mt_grpo.rollout import Sample, SamplingParams
from mt_grpo.rollout.engines.vllm import VLLMServerClient
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer
from support.models import CPU_RUN, build_model, build_tokenizer
from support.servers import RealServer

LENGTH = 512
TOLERANCE = 1e-4
"""Nats between the log-probs of server and trainer."""


def tiny_model(tokenizer: Any, **overrides: object) -> PreTrainedModel:
    return build_model(tokenizer, head_dim=32, **overrides).eval()  # the smallest that vLLM's CPU attention knows


def save_both(model: PreTrainedModel, processor: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


class Served:
    """
    A context in which a server runs.

    Args:
        folder: Takes the model and the server's log.
        model, processor: What is served: a tiny model and its tokenizer by default.
        options: Further options of the server's recipe.
        length: Tokens of its context.
        save: Saves model and processor as a server needs them.
    """

    def __init__(self, folder, model=None, processor=None, *options, length=LENGTH, save=save_both, **more) -> None:
        self.processor = processor or build_tokenizer()
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)
        self.model = model or tiny_model(self.tokenizer)
        self.folder, self.path = folder, str(folder / "model")
        save(self.model, self.processor, folder / "model")
        options = ("--vllm_max_model_length", str(length), *options)
        self.server = RealServer(self.path, folder / "server.log", *options, **more)

    def __enter__(self) -> Served:
        self.server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.stop()

    def client(self, *others: str, **options: Any) -> VLLMServerClient:
        """A client of this server, and of others."""
        options = {"model": self.path, "server_timeout": 20.0, **options}
        client = VLLMServerClient([self.server.url, *others], self.tokenizer, **options)
        asyncio.run(client.connect())
        return client

    def prompts(self, number: int = 6) -> list[list[int]]:
        return [self.tokenizer.encode(f"user What is the capital of Peru {index}") for index in range(number)]

    def sample(self, contexts, client: VLLMServerClient | None = None, **sampling: Any) -> list[Sample]:
        """What the server makes of each context, all at once."""
        client = client or self.client()

        async def go() -> list[Sample]:
            try:
                asked = (client.generate(ids, SamplingParams(**sampling), str(n)) for n, ids in enumerate(contexts))
                return await asyncio.gather(*asked)
            finally:
                for n in range(len(contexts)):
                    client.release(str(n))
                await client.close()

        return asyncio.run(go())

    def train(self, env, rewards, rows, folder=None, model=None, **options) -> tuple[MTGRPOEnvTrainer, list[dict]]:
        """Trains the model, or another one, with this server. Returns the trainer, and what it logged of each step."""
        options |= {"use_vllm": True, "vllm_server_base_url": self.server.url}
        args = MTGRPOConfig(str(folder or self.folder / "run"), **CPU_RUN, **options)
        rest = {"train_dataset": rows, "processing_class": self.processor}
        trainer = MTGRPOEnvTrainer(model or self.path, env, [], rewards, args, **rest)
        trainer.train()
        trainer.weight_sync.close()
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert len(steps) == args.max_steps
        return trainer, steps


@torch.no_grad()
def differences(model: PreTrainedModel, context: list[int], sample: Sample) -> torch.Tensor:
    """Nats for each token between the log-prob that it was sampled with and the model's own."""
    logits = model(input_ids=torch.tensor([context + sample.ids])).logits[0, len(context) - 1 : -1].float()
    own = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(sample.ids).unsqueeze(1))[:, 0]
    return (own - torch.tensor(sample.logprobs)).abs()


def difference(model: PreTrainedModel, contexts: list[list[int]], samples: list[Sample]) -> float:
    """The largest."""
    pairs = zip(contexts, samples, strict=True)
    return max(float(differences(model, context, sample).max()) for context, sample in pairs)
