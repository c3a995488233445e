"""What loading weights costs a vLLM server at least, measured inside it: `vllm --worker-extension-cls`."""

from __future__ import annotations

import os
import time

import torch
from safetensors.torch import load_file
from vllm import _custom_ops as ops

from mt_grpo.vllm_plugin.guard import ALLOWED, Guard


class BoundsGuard(Guard):
    """Lets `Bounds` be asked for too."""

    allowed = ALLOWED | {("POST", "/collective_rpc")}


class Bounds:
    """Becomes a base of the server's worker, which has its memory allocator and its number of threads."""

    def bounds(self, path: str) -> dict[str, float]:
        """
        Seconds, and processor's seconds (`cpu`), to copy the tensors of a safetensors file from memory to memory, and
        to pack its matrices as vLLM's CPU build packs every linear layer's for oneDNN; the worker's threads and pid.
        """
        if not hasattr(self, "_tensors"):
            self._tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
            self._copies = {name: tensor.clone() for name, tensor in self._tensors.items()}
        start, cpu = time.perf_counter(), time.process_time()
        for name, tensor in self._tensors.items():
            self._copies[name].copy_(tensor)
        copied, copied_cpu = time.perf_counter(), time.process_time()
        for tensor in self._tensors.values():
            if tensor.ndim == 2:
                ops.create_onednn_mm(tensor.t(), 32)  # freed at once, as a layer's former one is
        return {
            "copy": copied - start,
            "copy cpu": copied_cpu - cpu,
            "pack": time.perf_counter() - copied,
            "pack cpu": time.process_time() - copied_cpu,
            "threads": torch.get_num_threads(),
            "pid": os.getpid(),
        }
