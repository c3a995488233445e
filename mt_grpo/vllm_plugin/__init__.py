"""What runs inside the vLLM server: loaded through the entry-point group `vllm.general_plugins`; needs vLLM only."""

from __future__ import annotations

import os
from functools import partialmethod

BACKEND = "safetensors"
"""Name of the weight-transfer engine, as in `--weight-transfer-config '{"backend": "safetensors"}'`."""

SECONDS_TO_END = 3
"""Seconds that requests under way have when the server is told to end."""


def register() -> None:
    """
    Makes the weight-transfer engine known to this process of the server, and its end a matter of seconds: told to end
    in the middle of requests, vLLM waits for answers that its engine, which it has killed by then, never gives.
    """
    import uvicorn
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # vLLM loads plugins more than once in some processes
        WeightTransferEngineFactory.register_engine(
            BACKEND, "mt_grpo.vllm_plugin.engine", "SafetensorsWeightTransferEngine"
        )
    if "MT_GRPO_SERVER" in os.environ:  # other servers of the same environment are left alone
        uvicorn.Config.__init__ = partialmethod(uvicorn.Config.__init__, timeout_graceful_shutdown=SECONDS_TO_END)
