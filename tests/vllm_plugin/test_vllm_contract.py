"""
What is relied on in vLLM, looked up in the source of the installed one, as it promises none of these names. Where a
version has others, this says which, before any server is started.
"""

import ast
import re
from functools import cache
from pathlib import Path

import orjson
import pytest
from support.forking import SERVER_PYTHON
from support.recipes import parse_recipe
from support.servers import needs_server

from mt_grpo.app.serve import _PARSERS, server_command
from mt_grpo.rollout.engines import SamplingParams
from mt_grpo.rollout.engines.vllm import _completion_request, _generate_request
from mt_grpo.servers import cache_scheduler
from mt_grpo.vllm_plugin.guard import ALLOWED, SCHEDULING, SLEEP

pytestmark = needs_server

PACKAGE = Path(__file__).parents[2] / "mt_grpo"
VLLM = next((SERVER_PYTHON.parents[1] / "lib").glob("python*/site-packages/vllm"), SERVER_PYTHON)
BASE = "distributed/weight_transfer/base.py WeightTransferEngine"
RELOAD = "model_executor/model_loader/reload/layerwise.py"
EXPERTS = "model_executor/layers/fused_moe/unquantized_fused_moe_method.py UnquantizedFusedMoEMethod"
RUNNER = "v1/worker/gpu_model_runner.py GPUModelRunner"  # what the CPU's inherits from
ROUTES = "distributed/aux_output_connector/worker.py"
TRANSFER = "distributed/weight_transfer"
FUNCTIONS = {
    f"{TRANSFER}/factory.py WeightTransferEngineFactory register_engine": "name module_path_or_cls class_name",
    f"{TRANSFER}/packed_tensor.py packed_nccl_broadcast_producer": "iterator group src post_iter_func",
    f"{TRANSFER}/nccl_common.py trainer_init": "init_info",  # by TRL
    f"{BASE} __init__": "config vllm_config device model",
    f"{BASE} parse_update_info": "update_dict",
    f"{RELOAD} initialize_layerwise_reload": "model",
    f"{RELOAD} finalize_layerwise_processing": "model model_config",
    f"{EXPERTS} _setup_kernel": "layer w13 w2",
    f"{RUNNER} initialize_kv_cache": "kv_cache_config",
    f"{RUNNER} execute_model": "scheduler_output",
    f"{RUNNER} sample_tokens": "grammar_output",
    "config/vllm.py VllmConfig _verify_aux_output_compatibility": "",
    f"{ROUTES} get_aux_output_connector": "model vllm_config kv_cache_config",
    f"{ROUTES} AuxOutputWorkerConnector begin_step": "metadata",
    f"{ROUTES} AuxOutputWorkerConnector prepare_output": "input_batch",
    f"{ROUTES} PendingAuxOutput enqueue_cpu_copy": "num_sampled num_rejected",
    f"{ROUTES} PendingAuxOutput process_output": "",
}
"""What is called or replaced, and what it is given: whatever else it takes has a default."""
COMPLETION = "entrypoints/openai/completion/protocol.py"
GENERATE = "entrypoints/scale_out/token_in_token_out/protocol.py"
WORDS = {
    "v1/worker/gpu_worker.py": (
        "already active",
        "without a matching start",
        "parse_init_info",
        "init_transfer_engine",
    ),
    f"{TRANSFER}/ipc_engine.py": ("names", "dtype_names", "shapes", "tensor_sizes", "ipc_handles_pickled", "packed"),
    f"{TRANSFER}/nccl_engine.py": ("names", "dtype_names", "shapes"),
    COMPLETION: ("tokens", "token_logprobs", "top_logprobs", "finish_reason", "routed_experts", "system_fingerprint"),
    GENERATE: ("token_ids", "logprob", "finish_reason", "routed_experts"),
    "entrypoints/serve/dev/server_info/api_router.py": ("vllm_config", "vllm_env"),
    "entrypoints/serve/dev/cache/api_router.py": ("success", "reset_running_requests"),
    "entrypoints/openai/api_server.py": ("__main__",),
    "entrypoints/launchers/launcher.py": ("uvicorn.Config(",),
    "config/weight_transfer.py": ("backend",),
    "config/model.py": ("logprobs_mode", "processed_logprobs"),
    "plugins/__init__.py": ("vllm.general_plugins",),
}
"""What is said to us, or read from us, in the module that says or reads it."""


@cache
def source(path):
    return (VLLM / path).read_text()


@cache
def found(path, *names):
    """What a module defines by a name, or a class of it by a second one."""
    node = ast.parse(source(path))
    for name in names:
        node = next(each for each in node.body if getattr(each, "name", None) == name)
    return node


def fields(path, name):
    return {each.target.id for each in found(path, name).body if isinstance(each, ast.AnnAssign)}


def sources(pattern):
    return "\n".join(path.read_text() for path in sorted(VLLM.glob(pattern)))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_take_what_they_are_given(function):
    arguments, given = found(*function.split()).args, FUNCTIONS[function].split()
    names = [each.arg for each in arguments.args if each.arg not in ("self", "cls")]
    assert names[: len(given)] == given
    assert len(names) - len(given) <= len(arguments.defaults) and None not in arguments.kw_defaults


def test_what_is_imported_is_there():
    for path in (*PACKAGE.glob("vllm_plugin/*.py"), PACKAGE / "weights/gpu.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("vllm."):
                module = VLLM.parent / node.module.replace(".", "/")
                text = (module / "__init__.py" if module.is_dir() else module.with_suffix(".py")).read_text()
                assert not [each.name for each in node.names if not re.search(rf"\b{each.name}\b", text)], module


def test_the_engine_has_the_methods_that_vllm_asks_for():
    methods = [each for each in found(*BASE.split()).body if isinstance(each, ast.FunctionDef)]
    abstract = {each.name for each in methods if "abstractmethod" in map(ast.unparse, each.decorator_list)}
    ours = ast.parse((PACKAGE / "vllm_plugin/engine.py").read_text()).body
    (engine,) = (each for each in ours if getattr(each, "name", "") == "SafetensorsWeightTransferEngine")
    assert abstract and abstract <= {each.name for each in engine.body if isinstance(each, ast.FunctionDef)}


def test_the_endpoints_are_there():
    routes = re.findall(r"\.(get|post)\(\s*\"(/[^\"]+)\"", sources("entrypoints/**/*.py"))
    asked = ALLOWED | {(method, path) for method, path, _ in SCHEDULING | SLEEP}
    assert asked - {(method.upper(), path) for method, path in routes} == {("GET", "/metrics")}  # it is mounted
    assert 'Mount("/metrics"' in source("entrypoints/serve/instrumentator/metrics.py")


def test_requests_have_the_fields_that_are_sent():
    """Fields that it does not know are ignored, not refused."""
    sampling = SamplingParams(max_tokens=1, routes_from=1)
    sent = orjson.loads(_completion_request("m", [1], sampling, logprob_token_ids=[1], cache_salt="s"))
    assert sent.keys() <= fields(COMPLETION, "CompletionRequest")
    sent = orjson.loads(_generate_request("m", [1], sampling, {}, cache_salt="s"))
    assert sent.keys() <= fields(GENERATE, "GenerateRequest")
    assert sent["sampling_params"].keys() <= fields("sampling_params.py", "SamplingParams")


@pytest.mark.parametrize("path", WORDS)
def test_what_is_read_has_its_names(path):
    text = re.sub(r"\"\s*\n\s*\"", "", source(path))  # a sentence over several lines is one
    assert not [word for word in WORDS[path] if word not in text]


def test_metrics_have_their_names():
    asked = set(re.findall(r"\"(vllm:\w+?)(?:_total|_sum)?\"", Path(cache_scheduler.__file__).read_text()))
    assert len(asked) == 8 and not [name for name in asked if f'"{name}"' not in source("v1/metrics/loggers.py")]


@pytest.mark.parametrize("options", [(), ("--weight_sync", "lora", "--use_peft", "true"), ("--weight_sync", "nccl")])
def test_the_flags_of_the_server_are_there(options):
    command, variables = server_command(parse_recipe(["recipes/quickstart.yaml", "--use_vllm", "true", *options]))
    flags = {word.removeprefix("--").removeprefix("no-") for word in command if word.startswith("--")}
    flags |= {"enable-scale-out", "mm-device-do-normalize", "enable-sleep-mode", "enable-return-routed-experts"}
    flags |= {"async-scheduling", "gpu-memory-utilization", "max-model-len", "tool-call-parser", "lora-modules"}
    known = source("engine/arg_utils.py") + sources("entrypoints/*/cli_args.py")
    assert not [flag for flag in flags if not re.search(rf"^    {flag.replace('-', '_')}: ", known, re.MULTILINE)]
    variables = {*variables, "VLLM_USE_V2_MODEL_RUNNER", "VLLM_ALLOW_INSECURE_SERIALIZATION"}
    ours = {name for name in variables if name.startswith("VLLM_")}
    assert not [name for name in ours if f'"{name}"' not in source("envs.py")]
    assert not [name for name in _PARSERS.values() if f'"{name}"' not in source("tool_parsers/__init__.py")]
