"""Runs inside the vLLM server, which loads it by the entry point `vllm.general_plugins`. Needs vLLM only."""

from __future__ import annotations

import os
import sys
from functools import partialmethod

BACKEND = "safetensors"
"""Name of the weight-transfer engine, as in `--weight-transfer-config '{"backend": "safetensors"}'`."""

IDENTITY = "mt-grpo-server"
"""Header that the guard adds to answers: which server gave them. Not all of vLLM's bodies say it."""

SECONDS_TO_END = 3
"""Seconds that requests under way have to finish when the server is told to end."""


def register() -> None:
    """
    Registers the weight-transfer engine with this process of the server, and bounds the time that the server takes to
    end. Without the bound, a vLLM that is told to end waits for answers of its engine, which it has already killed.
    With `MT_GRPO_ROUTES` the CPU build returns the routes of mixtures.
    """
    import uvicorn
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # vLLM loads plugins more than once in some processes
        WeightTransferEngineFactory.register_engine(
            BACKEND, "mt_grpo.vllm_plugin.engine", "SafetensorsWeightTransferEngine"
        )
    if "MT_GRPO_SERVER" in os.environ:  # other servers of the same environment are left alone
        bounded = partialmethod(uvicorn.Config.__init__, timeout_graceful_shutdown=SECONDS_TO_END)
        uvicorn.Config.__init__ = bounded  # type: ignore[method-assign, assignment]  # vLLM has no option for it
    if os.environ.get("MT_GRPO_ROUTES") and "mt_grpo.vllm_plugin.routes" not in sys.modules:
        from mt_grpo.vllm_plugin.routes import return_routes_on_cpu

        return_routes_on_cpu()
