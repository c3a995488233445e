"""Servers that hold the weights they are sent, and a broadcast without NCCL."""

from __future__ import annotations

import asyncio
import copy
import threading
from pathlib import Path

from peft import PeftModel
from safetensors.torch import load_file

from mt_grpo.rollout import SamplingParams
from mt_grpo.rollout.engines.vllm import VLLMServerClient
from mt_grpo.servers.fleet import Owner
from mt_grpo.vllm_plugin.fetch import Checksum, Fetcher, FetchError
from mt_grpo.vllm_plugin.guard import FETCH
from mt_grpo.weights.transport import trainer_logprobs
from support.loopback import ScriptedServer
from support.models import build_model

STATES = ("finished without a matching start_weight_update", "already active")
"""As vLLM has it of calls that are made twice."""


class Replica:
    """
    A scripted server that loads weight files and adapters, scores prompts with them, and samples its weights' step.

    Args:
        lost (`int`): The first so many updates break the connection.
        port (`int`): Where it listens; a free port where none is given.
        folder (`str`): What it says that its model was loaded from.
    """

    def __init__(self, tokenizer, lost: int = 0, port: int = 0, folder: object = "base", **overrides) -> None:
        self.tokenizer, self.lost, self.refused = tokenizer, lost, None
        self.entry = {"id": str(folder), "root": str(folder)}
        self.entry["max_model_len"] = overrides.get("max_position_embeddings", 64)
        self.model, self.version, self.updates = build_model(tokenizer, seed=9, **overrides), "default", 0
        self.dtype, self.backend, self.loaded = "torch.float32", "safetensors", "nothing"
        self.adapters: dict[str, PeftModel] = {}
        self.lora: dict | None = {"max_lora_rank": 8}
        """What it was started with for adapters."""
        self.deaf = False
        """Whether updates are answered as if they had been done."""
        self.agrees = False
        """Whether every checksum is agreed with."""
        self.blind = False
        """Whether the trainer's files are on another machine."""
        self.skipped: set[str] = set()
        """Weights that do not reach their layer."""
        self.dies_at: str | None = None
        """The path at which its engine dies, while its process answers."""
        self.dead = self.active = False
        self.http = ScriptedServer(self.answer, port)

    def answer(self, method, path, body):
        self.dead |= path == self.dies_at
        if self.dead:
            return 503 if path == "/health" else 500, {"error": {"message": "EngineCore encountered an issue."}}
        if path == self.refused:
            return 500, "no"
        if path in ("/start_weight_update", "/finish_weight_update"):
            if self.active == (path == "/start_weight_update"):
                return 500, f"{path} while a weight update is {STATES[self.active]}."
            self.active = not self.active
        if path == "/init_weight_transfer_engine":
            return self.confirmed(**body["init_info"])
        if path == "/update_weights":
            self.updates += 1
            if self.updates <= self.lost:
                return None
            if not self.deaf:
                self.load(body["update_info"]["path"])
        if path in ("/finish_weight_update", "/update_weight_version"):
            self.version = body.get("weight_version", body.get("new_version", self.version))
        if path == "/v1/load_lora_adapter" and not self.deaf:
            base = copy.deepcopy(self.model)
            self.adapters[body["lora_name"]] = PeftModel.from_pretrained(base, body["lora_path"])
            self.adapters[body["lora_name"]].folder = body["lora_path"]
        if path == "/v1/completions":
            return 200, self.scored(body) if "prompt_logprobs" in body else self.sampled()
        entries = [{"id": name, "root": adapter.folder} for name, adapter in self.adapters.items()]
        config = {"logprobs_mode": "processed_logprobs", "dtype": self.dtype}
        return 200, {
            "/v1/models": {"data": [self.entry, *entries]},
            "/server_info": {
                "vllm_config": {
                    "model_config": config,
                    "weight_transfer_config": {"backend": self.backend},
                    "lora_config": self.lora,
                },
                "vllm_env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": self.lora is not None},
            },
            "/weight_info": {"weight_version": self.version},
            "/version": {"version": "0.31.0"},
            "/tokenize": {"tokens": self.tokenizer.encode(body.get("prompt", ""), add_special_tokens=False)},
            "/reset_prefix_cache": {"success": True},
        }.get(path, {})

    def confirmed(self, checksum, path=None):
        if self.blind and path is not None:
            return 500, {"error": {"message": f"No such file or directory: {path}"}}
        seen = self.loaded if path is None else Checksum.of_file(path)
        return (200, {}) if self.agrees or seen == checksum else (500, f"The checksum is {seen}, not {checksum}.")

    def load(self, path):
        tensors = load_file(path)
        self.loaded = Checksum.of_file(path)
        self.take(tensors)

    def take(self, tensors):
        self.model.load_state_dict({k: v for k, v in tensors.items() if k not in self.skipped}, strict=False)

    def scored(self, body):
        logprobs = trainer_logprobs(self.adapters.get(body["model"], self.model), body["prompt"])
        rows = [{str(token): {"logprob": value}} for token, value in zip(body["prompt"][1:], logprobs, strict=True)]
        return {"choices": [{"prompt_logprobs": [None, *rows]}]}

    def sampled(self):
        tokens = {"tokens": [f"token_id:{step_of(self.version)}"], "token_logprobs": [-0.5]}
        return {"choices": [{"logprobs": tokens, "finish_reason": "stop"}], "system_fingerprint": self.http.url}


def step_of(version: str) -> str:
    return Owner.read(version).step


def sampled_steps(client: VLLMServerClient, until_all_are_up: bool = False) -> set[int]:
    """The steps whose weights six conversations are sampled with."""
    sampling = SamplingParams(max_tokens=1)

    async def go():
        taken = [await client.generate([number, 1], sampling, str(number)) for number in range(6)]
        while until_all_are_up and not all(server.up for server in client.servers):
            await client.generate([1], sampling, "waits")
        for number in range(6):
            client.release(str(number))
        await client.close()
        return {each.ids[0] for each in taken}

    return asyncio.run(asyncio.wait_for(go(), 60))


class Remote(Replica):
    """A server on another machine: it sees only what it has fetched into `folder`."""

    def __init__(self, tokenizer, folder: Path | None) -> None:
        super().__init__(tokenizer)
        self.folder, self.fetcher, self.urls = folder, Fetcher(str(folder)), []

    def answer(self, method, path, body):
        if path == FETCH and path != self.refused:
            self.urls.append(body["url"])
            try:
                return 200, {"path": self.fetcher.fetch(**body)}
            except FetchError as error:
                return 424, {"error": str(error)}
        if path == "/update_weights" and self.folder is not None:
            assert Path(body["update_info"]["path"]).is_relative_to(self.folder)
        return super().answer(method, path, body)

    def close(self) -> None:
        self.http.stop()
        self.fetcher.close()


class Receiver(Replica):
    """
    A server whose workers take part in a broadcast, as both ends of NCCL must before either goes on.

    Args:
        failing (`int`, *optional*): The update, from 0, in which it fails before it takes part.
    """

    def __init__(self, tokenizer, failing: int | None = None) -> None:
        super().__init__(tokenizer)
        self.backend, self.failing = "nccl", failing
        self.offered: list = []
        self.offer, self.taken = threading.Semaphore(0), threading.Semaphore(0)

    def answer(self, method, path, body):
        if path != "/update_weights":
            return super().answer(method, path, body)
        self.updates += 1
        if self.updates - 1 == self.failing:
            return 500, "CUDA out of memory"
        self.offer.acquire()
        bucket = self.offered.pop()
        assert [name for name, _ in bucket] == body["update_info"]["names"]
        assert [str(tensor.dtype) for _, tensor in bucket] == [
            f"torch.{name}" for name in body["update_info"]["dtype_names"]
        ]
        self.take(dict(bucket))
        self.taken.release()
        return 200, {}


class ScriptedGroup:
    """The trainer's end: a broadcast that waits for the server, or until it is aborted."""

    server: Receiver
    log = staticmethod(lambda event: None)

    def __init__(self, *args):
        self.receiver, self.aborted = self.server, False

    def send(self, bucket):
        self.log("send")
        self.receiver.offered.append(bucket)
        self.receiver.offer.release()
        self.receiver.taken.acquire()
        self.log("sent")
        if self.aborted:
            raise RuntimeError("NCCL error: unhandled system error")

    def abort(self):
        self.aborted = True
        self.receiver.taken.release()
