"""Transport by NCCL broadcast between GPUs: TRL's own transfer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from trl.import_utils import is_vllm_available

from mt_grpo.errors import ConfigError
from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.rollout.engines.vllm.http import ServerControl
from mt_grpo.weights.nccl_group import NcclGroup, send_bucket, take_bucket
from mt_grpo.weights.parameters import FullParameters
from mt_grpo.weights.transport import WeightTransport, weight_transport
from mt_grpo.weights.update_calls import (
    WeightSyncError,
    check_holder,
    paused,
    updating,
)
from mt_grpo.weights.weight_file import exhaust


@weight_transport("nccl")
class NcclTransport(WeightTransport):
    """
    Sends weights by NCCL broadcast between GPUs, as TRL does. It needs vLLM in the trainer's environment too. The
    server joins a process group when the run begins. A server that is restarted cannot join it again, so the run ends,
    and can be resumed from its checkpoint.

    Args:
        group_port (`int`, *optional*, defaults to `51216`): Port of that process group.

    Raises:
        ConfigError: If vLLM is not installed here, or there are several servers.
    """

    repeatable = False
    server_backend = "nccl"

    def __init__(
        self,
        client: VLLMServerClient,
        get_model: Callable[[], Any],
        accelerator: Accelerator,
        *,
        group_port: int = 51216,
        **options: Any,
    ) -> None:
        for fault, hindrance in (
            ("needs vLLM in the trainer's environment too, where it is not installed", not is_vllm_available()),
            ("reaches one server, and several are named", len(client.base_urls) > 1),
        ):
            if hindrance:
                raise ConfigError(f"`weight_sync: nccl` {fault}: mend that, or choose `weight_sync: safetensors`.")
        super().__init__(client, get_model, accelerator, **options)
        self._parameters = FullParameters(get_model(), accelerator)
        self._group: NcclGroup | None = None
        self._group_port = group_port

    @staticmethod
    def options(args: Any) -> dict[str, Any]:
        return {"group_port": args.vllm_group_port}

    def _prepare(self, server: ServerControl, config: dict[str, Any]) -> None:
        timeout = self.client.server_timeout
        try:
            self._group = NcclGroup(
                server.base_url, self.client.api_key, self._group_port, timeout, self.accelerator.device
            )
        except Exception as error:  # TRL raises it bare
            raise WeightSyncError(
                f"No NCCL group with the vLLM server at {server.base_url} could be made ({error}): start it with "
                "`mt-grpo serve` and this run's recipe, or choose `weight_sync: safetensors`."
            ) from error

    def _gather(self, step: int | None) -> None:
        """
        Also sends the weights. All processes finish gathering a bucket before the main one sends it, because two
        groups that broadcast at the same time may deadlock.
        """
        server = self._control(self.client.base_urls[0])
        with contextlib.closing(server), contextlib.ExitStack() as update:

            def begin_update() -> None:
                self._wait_for_one()
                check_holder(server, self.run)
                update.enter_context(paused(server))
                update.enter_context(updating(server, self._label(step)))

            def send(bucket: list[tuple[str, torch.Tensor]]) -> None:
                assert self._group is not None  # the process that sends has made it in `_prepare`
                send_bucket(server, self._group, bucket)

            # before anyone walks over the parameters, which all must do or none
            self._run(lambda: None, begin_update)
            self._parameters.model, self._parameters.dtype = self.get_model(), self.dtype
            self._parameters.changed = self.changed
            walk = iter(self._parameters)
            try:
                while bucket := self._take(walk):
                    self._run(lambda: None, functools.partial(send, bucket))
            finally:  # a failure ends all processes at the same bucket; gathering the rest takes all of them
                exhaust(walk)

    def _take(self, walk: Iterator[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        bucket = take_bucket(walk, self.accelerator.is_main_process)
        if self.accelerator.device.type == "cuda":
            torch.accelerator.synchronize()
        self.accelerator.wait_for_everyone()
        return bucket

    def _push(self, server: ServerControl, step: int | None) -> None:
        """Does nothing: `_gather`, in which every process takes part, has sent the weights."""

    def restore(self, base_url: str) -> None:
        raise WeightSyncError(
            f"The vLLM server at {base_url} was restarted and has left the NCCL group of this run: resume the run "
            "from its latest checkpoint."
        )
