"""Checks of the machine: devices, servers, ports, packages, folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

import mt_grpo
from mt_grpo.app.doctor.case import FAIL, OK, WARN, Case, Lines
from mt_grpo.app.env import MISSING, SERVER, version_here, version_in
from mt_grpo.app.request import check_writable
from mt_grpo.concurrency import run
from mt_grpo.envs.env import ServedEnv
from mt_grpo.errors import ConfigError
from mt_grpo.options.rules import check_groups
from mt_grpo.servers.env_servers import in_words
from mt_grpo.servers.http import RequestFailed, ServerControl
from mt_grpo.servers.processes import is_free
from mt_grpo.training.folder import check_folder
from mt_grpo.training.model import resolve_base
from mt_grpo.training.preflight import check_push, check_trackers
from mt_grpo.training.servers import server_client

PATIENCE = 3.0
"""Seconds in which a server answers."""
MEETING_PORT = 29500
"""Where accelerate lets the processes of a machine meet."""


def device(case: Case) -> Lines:
    """Whether the GPUs of the run are here, or stated."""
    if case.args.use_cpu:
        yield OK, "the run is on the CPU, as `use_cpu: true` says", ""
        return
    if case.args.fp16 and not case.on_gpu:
        raise ConfigError("`fp16: true` needs a GPU, and this run would be on a CPU: leave it out.")
    here = torch.cuda.device_count()
    if not here and not case.states_gpu:
        words = "there is no GPU here, so this run would be on the CPU"
        mend = "state the GPUs of the machine that it is for, as `--gpu H100 --num_processes 7`"
        if case.args.bf16:
            yield FAIL, f"{words}, where `bf16: true` is refused", f"{mend}, or set `use_cpu: true`"
        else:
            yield WARN, words, f"{mend}, or set `use_cpu: true`"
    elif here < case.processes:
        yield (
            WARN,
            f"the run takes {case.processes} GPUs to train, and {here} are here",
            "the plan is for those stated",
        )
    else:
        yield OK, f"{here} GPUs are here, and {case.processes} train", ""


def environment(case: Case) -> Lines:
    """Whether the OpenEnv servers of the environments answer."""
    remote = [one for one in case.environments if isinstance(one, ServedEnv)]
    if not remote:
        yield OK, "none is on OpenEnv servers", ""
    for one in remote:
        gone = run(one.check())
        there = f"{len(one.pool.urls) - len(gone)} of {len(one.pool.urls)} OpenEnv servers answer"
        if gone:
            yield WARN, f"{there} ({in_words(gone)})", "start the others, or leave them out"
        else:
            yield OK, there, ""


def server(case: Case) -> Lines:
    """Whether the servers answer and hold this run's model."""
    if not case.args.use_vllm:
        yield OK, "none is needed: the trainer samples from its own model", ""
        return
    if case.colocated:
        check_groups(vars(case.args), case.processes)
        several = f"{len(case.urls)} servers" if len(case.urls) > 1 else "a server"
        yield OK, f"none is needed: the trainer starts {several} on its own {'GPUs' if case.on_gpu else 'machine'}", ""
        return
    for url in case.urls:
        fault = server_fault(url)
        if fault is not None:
            yield FAIL, fault, "start it with `mt-grpo serve` and this recipe, on a GPU that does not train"
            return
    client = server_client(case.args, case.tokenizer, resolve_base(case.name))
    client.server_timeout = PATIENCE
    try:
        run(client.connect(lambda words: None))
    except RequestFailed as error:
        raise ConfigError(str(error)) from error
    yield OK, f"{', '.join(case.urls)} holds this run's model, with a context of {client.context_length} tokens", ""


def server_fault(url: str) -> str | None:
    """Why a server cannot be used, from its answer to `/health`."""
    try:
        ServerControl(url, timeout=PATIENCE).get("/health")
    except RequestFailed as error:
        return str(error).removesuffix(".")
    return None


def server_environment(case: Case) -> Lines:
    """Whether vLLM is installed where `mt-grpo serve` looks for it."""
    if not case.args.use_vllm or case.local_port is None:
        yield OK, "vLLM is not needed on this machine", ""
        return
    folder = Path(mt_grpo.__file__).parents[1] / ".venv-vllm"
    for place, found in ((folder.name, version_in(folder, *SERVER)), ("this environment", version_here("vllm"))):
        if found != MISSING:
            yield OK, f"vLLM {found} is in {place}", ""
            return
    yield (
        FAIL,
        "vLLM is neither in `.venv-vllm` nor in this environment",
        'install it: `TORCH="" scripts/install.sh .venv-vllm ".[vllm]"`, or on a CPU `make server-cpu`',
    )


def ports(case: Case) -> Lines:
    """Whether the ports of the run are free, or taken by its own server."""
    if case.colocated:
        first = case.args.vllm_server_port
        taken = [str(port) for port in range(first, first + len(case.urls)) if not is_free(port)]
        if taken:
            mend = "give the run another `vllm_server_port`: its servers take that one and those after it"
            yield FAIL, f"port {', '.join(taken)} is taken, where the trainer starts a server", mend
        else:
            yield OK, f"port {first}{f' to {first + len(case.urls) - 1}' * (len(case.urls) > 1)} is free", ""
    elif case.args.use_vllm and case.local_port is not None:
        port = case.local_port
        if is_free(port):
            yield OK, f"port {port} is free for the server", ""
        elif server_fault(case.urls[0]) is None:
            yield OK, f"the server listens on port {port}", ""
        else:
            yield (
                FAIL,
                f"port {port} is taken by another program",
                "give server and trainer another `vllm_server_port`",
            )
    if case.processes > 1:
        if is_free(MEETING_PORT):
            yield OK, f"port {MEETING_PORT} is free for the processes to meet", ""
        else:
            mend = "end what holds it, or give accelerate another `main_process_port`"
            yield FAIL, f"port {MEETING_PORT}, where the processes meet, is taken", mend
    elif not case.args.use_vllm:
        yield OK, "none is needed", ""


def trackers(case: Case) -> Lines:
    """Whether the packages of `report_to` are installed, and the Hub can be pushed to."""
    check_trackers(case.args)
    if case.args.push_to_hub:
        check_push(case.args)
    yield OK, f"metrics go to {', '.join([*case.args.report_to, 'metrics.jsonl'])}", ""


def output(case: Case) -> Lines:
    """Whether the run can begin in its folder."""
    folder = case.args.output_dir
    check_writable(folder)
    check_folder(case.args, case.name if Path(case.recipe.model.model_name_or_path).exists() else "")
    yield OK, f"the run can begin in {folder}", ""


def free_bytes(folder: str | Path) -> int:
    """Free bytes of the disk on which a folder is, or will be."""
    path = Path(folder).absolute()
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free
