"""What runs inside the vLLM server: loaded through the entry-point group `vllm.general_plugins`; needs vLLM only."""

from __future__ import annotations

BACKEND = "safetensors"
"""Name of the weight-transfer engine, as in `--weight-transfer-config '{"backend": "safetensors"}'`."""


def register() -> None:
    """Makes the weight-transfer engine known to this process of the server; calling it again changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # vLLM loads plugins more than once in some processes
        WeightTransferEngineFactory.register_engine(
            BACKEND, "mt_grpo.vllm_plugin.engine", "SafetensorsWeightTransferEngine"
        )
