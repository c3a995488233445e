"""
The experts that tokens went to, from vLLM's CPU build. vLLM returns them from its second model runner only, and that
needs Triton. What keeps and returns them needs neither: here the CPU's runner is given it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def return_routes_on_cpu() -> None:
    """Lets the CPU's runner take `--enable-return-routed-experts`, see `_verify` for what it needs beside it."""
    VllmConfig._verify_aux_output_compatibility = _verify
    initialize, execute, sample = (
        CPUModelRunner.initialize_kv_cache,
        CPUModelRunner.execute_model,
        CPUModelRunner.sample_tokens,
    )

    def initialize_kv_cache(runner: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        initialize(runner, config, *args, **kwargs)
        runner.routes = get_aux_output_connector(runner.get_model(), runner.vllm_config, config)

    def execute_model(runner: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        runner.routes.begin_step(step.aux_output_connector_metadata)
        return execute(runner, step, *args, **kwargs)

    def sample_tokens(runner: Any, grammar: Any) -> Any:
        """Takes what the batch's tokens went to before their requests change, and adds it to what was sampled."""
        batch = runner.input_batch
        number = len(batch.req_ids)
        pending = runner.routes.prepare_output(
            SimpleNamespace(
                req_ids=batch.req_ids,
                query_start_loc_np=runner.query_start_loc.np[: number + 1].copy(),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[:number].copy(),
            )
        )
        output = sample(runner, grammar)
        if pending is not None:
            sampled = np.array([len(ids) for ids in output.sampled_token_ids])
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    CPUModelRunner.initialize_kv_cache = initialize_kv_cache
    CPUModelRunner.execute_model = execute_model
    CPUModelRunner.sample_tokens = sample_tokens


def _verify(config: VllmConfig) -> None:
    wanted = config.aux_output_config.enabled
    if wanted and (config.scheduler_config.async_scheduling or not config.cache_config.enable_prefix_caching):
        raise ValueError("Routes from a CPU need --no-async-scheduling and --enable-prefix-caching.")
