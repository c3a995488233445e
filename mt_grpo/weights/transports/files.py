"""Transports of files that the servers read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.rollout.engines.vllm.http import ServerControl
from mt_grpo.weights.parameters import FullParameters
from mt_grpo.weights.transport import WeightTransport, weight_transport
from mt_grpo.weights.update_calls import (
    check_folder,
    push_file,
)
from mt_grpo.weights.weight_file import Layout, WeightFile, exhaust, shared_folder, write_weights


class FolderTransport(WeightTransport):
    """
    Sends files that the servers read.

    Args:
        folder (`str`, *optional*): Folder that the servers see under the same path; shared memory by default.
    """

    def __init__(
        self,
        client: VLLMServerClient,
        get_model: Callable[[], Any],
        accelerator: Accelerator,
        *,
        folder: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(client, get_model, accelerator, **options)
        self._folder = shared_folder(folder, accelerator)

    @staticmethod
    def options(args: Any) -> dict[str, Any]:
        return {"folder": args.weight_sync_folder}

    def _prepare(self, server: ServerControl, config: dict[str, Any]) -> None:
        check_folder(server, config, self._folder)

    def close(self) -> None:
        """Removes the folder with its files, and gives the servers back."""
        if self.accelerator.is_main_process:
            shutil.rmtree(self._folder, ignore_errors=True)
        super().close()


@weight_transport("safetensors")
class SafetensorsTransport(FolderTransport):
    """Sends a safetensors file, in shared memory on one host or in a folder that all hosts see. Any device."""

    def __init__(
        self, client: VLLMServerClient, get_model: Callable[[], Any], accelerator: Accelerator, **options: Any
    ) -> None:
        super().__init__(client, get_model, accelerator, **options)
        self._parameters = FullParameters(get_model(), accelerator)
        self._layout: Layout | None = None
        self._files: list[WeightFile] = []

    def _gather(self, step: int | None) -> None:
        self._parameters.model, self._parameters.dtype = self.get_model(), self.dtype
        self._parameters.changed = self.changed
        if self._layout is None:
            self._layout = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._parameters]
        tensors = iter(self._parameters)
        if not self.accelerator.is_main_process:
            exhaust(tensors)
            return
        try:
            if len(self._files) < 2:
                self._files.insert(0, WeightFile(self._folder / f"{len(self._files)}.partial", self._layout))
            for file in self._files:
                file.withdraw()
            self.checksum = write_weights(self._files[0], self._file(step), tensors)
        finally:
            exhaust(tensors)
        self._files.reverse()

    def _push(self, server: ServerControl, step: int | None) -> None:
        push_file(server, self._file(step), self._label(step), self.checksum)

    def _file(self, step: int | None) -> Path:
        return self._folder / f"weights-{'proof' if step is None else f'{step:08d}'}.safetensors"
