"""A device apart from the CPU, made by a C++ compiler, for good: a tensor left on the CPU fails on it."""

import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils import cpp_extension
from transformers import PreTrainedModel, TrainingArguments

NAME = "other"
_SOURCE = Path(__file__).with_suffix(".cpp")


def make(folder: Path) -> torch.device:
    """Compiles the device into a folder (a minute of one core), and has PyTorch know it."""
    library = folder / "other_device.so"
    includes = [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
    libraries = [flag for path in cpp_extension.library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    libraries += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    named = ["-DTORCH_EXTENSION_NAME=other_device", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    flags = ["-std=c++20", "-fPIC", "-shared", "-O0", "-w"]
    subprocess.run(["g++", *flags, *named, *includes, str(_SOURCE), *libraries, "-o", str(library)], check=True)
    loader = ExtensionFileLoader("other_device", str(library))
    loader.exec_module(module_from_spec(spec_from_loader("other_device", loader)))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _runtime())
    torch.utils.generate_methods_for_privateuse1_backend()
    _mend_libraries()
    return torch.device(NAME, 0)


def _runtime() -> ModuleType:
    """What `torch.cuda` is for a GPU."""
    module: Any = ModuleType(f"torch.{NAME}")
    module.is_available, module.device_count, module.current_device = lambda: True, lambda: 1, lambda: 0
    module.set_device = module.manual_seed = module.manual_seed_all = lambda value: None
    module._is_in_bad_fork, module.synchronize = lambda: False, lambda *device: None
    module.device = lambda *device: nullcontext()
    module.get_rng_state = lambda device=0: torch.get_rng_state()
    module.set_rng_state = lambda state, device=0: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


def _mend_libraries() -> None:
    """What torch and transformers do on a GPU, and not yet on a device that they do not know."""
    histogram, to = torch.histc, nn.Module.to

    def counted(x, *args, **options):  # of integers
        return histogram(x.float() if x.device.type == NAME else x, *args, **options)

    def moved(self, *args, **options):  # parameters are made again, which ended what ties them
        to(self, *args, **options)
        for model in self.modules():
            if isinstance(model, PreTrainedModel):
                model.tie_weights()
        return self

    def held(storage):
        size = (storage.nbytes(),)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, size, (1,))

    def cpu(storage):
        return held(storage).cpu().untyped_storage()

    def clone(storage):
        return held(storage).clone().untyped_storage()

    def copy(storage, source, non_blocking=None):
        held(storage).copy_(held(getattr(source, "_untyped_storage", source)))
        return storage

    torch.histc, nn.Module.to = counted, moved
    torch.UntypedStorage.cpu, torch.UntypedStorage.clone, torch.UntypedStorage.copy_ = cpu, clone, copy


@contextmanager
def training_on(device: torch.device) -> Iterator[None]:
    """Trainers that are made here train on the device."""
    begin = PartialState.__init__

    def begun(self, *args, **options):
        begin(self, *args, **options)
        self.device = device

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartialState, "__init__", begun)
        patch.setattr(TrainingArguments, "device", property(lambda self: (self._setup_devices, device)[1]))
        AcceleratorState._reset_state(reset_partial_state=True)
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
