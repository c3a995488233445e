"""Syncs by a scripted NCCL from two processes with sharded weights; the second one fails: `ranks_nccl FOLDER`."""

import json
import sys
import time
from pathlib import Path

from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, broadcast_object_list
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mt_grpo.app.train import leave_group
from mt_grpo.errors import WeightSyncError
from mt_grpo.rollout.engines.vllm import VLLMServerClient
from mt_grpo.weights import gpu as weight_transports
from mt_grpo.weights.gpu import _take_bucket
from mt_grpo.weights.sync import WeightSync
from support.models import build_model, build_tokenizer
from support.replicas import Receiver, ScriptedGroup

LOG: list[tuple[str, float]] = []


def log(event: str) -> None:
    LOG.append((event, time.monotonic()))


def logged(walk):
    """A walk that notes when a parameter is gathered."""
    while True:
        log("gather")
        item = next(walk, None)
        log("gathered")
        if item is None:
            return
        yield item


def take(walk, keep):
    """A few parameters only, so that there are several buckets."""
    return _take_bucket(logged(walk), keep, 16_000)


def run(folder: str) -> Accelerator:
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU  # accelerate shards on GPUs only
    accelerator = Accelerator(cpu=True)
    weight_transports.is_vllm_available = lambda: True
    weight_transports._NcclGroup, weight_transports._take_bucket = ScriptedGroup, take
    ScriptedGroup.log = staticmethod(log)
    tokenizer = build_tokenizer()
    url = [None]
    if accelerator.is_main_process:
        ScriptedGroup.server = Receiver(tokenizer)
        url = [ScriptedGroup.server.http.url]
    broadcast_object_list(url)
    model, mesh = build_model(tokenizer), init_device_mesh("cpu", (accelerator.num_processes,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sync = WeightSync(weight_transports.NcclTransport, VLLMServerClient(url[0], tokenizer), lambda: model, accelerator)
    sync.sync(1)
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    report = {"log": list(LOG), "failure": None, "sharded": sharded}
    if accelerator.is_main_process:
        ScriptedGroup.server.failing = ScriptedGroup.server.updates + 1
    try:
        sync.sync(2)
    except WeightSyncError as error:
        report["failure"] = str(error)
    (Path(folder) / f"rank{accelerator.process_index}.json").write_text(json.dumps(report))
    accelerator.wait_for_everyone()
    sync.close()
    return accelerator


if __name__ == "__main__":
    leave_group(run(*sys.argv[1:]))
