"""
`mt-grpo doctor`: whether a run can begin, whether it fits, and about how long a step takes. Here are the GPUs that it
knows by name, which need no torch: memory, and speeds of which a run reaches a part.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean


class GPU(NamedTuple):
    """A GPU, as its data sheet has it."""

    name: str
    memory: float
    flops: float
    bandwidth: float

    @classmethod
    def named(cls, name: str) -> GPU:
        """The GPU of a name, however it is written: `rtx4090`, `NVIDIA H100 80GB HBM3`."""
        found = cls.find(name)
        if found is not None:
            return found
        # those of whose number and the given one either begins with the other, else the nearest in spelling
        models = {gpu.name: gpu.name.lower().removeprefix("rtx-").partition("-")[0] for gpu in _GPUS}
        words = [word for word in _words(name) if len(word) > 1]
        near = [one for one, model in models.items() if any(w.startswith(model) or model.startswith(w) for w in words)]
        nearest = f"; the nearest is {' or '.join(map(repr, near))}" if near else did_you_mean(name.upper(), models)
        raise ConfigError(
            f"The GPU {name!r} is unknown{nearest}: give one of {', '.join(models)}, or its memory, as `--gpu_memory "
            "48`."
        )

    @staticmethod
    def find(name: str) -> GPU | None:
        """The same, or `None`. The longest known name counts whose words are all in the given one."""
        given = _words(name)
        known = [gpu for gpu in _GPUS if given.issuperset(_words(gpu.name))]
        return max(known, key=lambda gpu: len(gpu.name), default=None)


_GPUS = (
    GPU("H100", 80, 989, 3.35),
    GPU("H200", 141, 989, 4.8),
    GPU("GH200", 96, 989, 4.0),
    GPU("B200", 180, 2250, 8.0),
    GPU("A100-40GB", 40, 312, 1.56),
    GPU("A100-80GB", 80, 312, 2.04),
    GPU("L4", 24, 121, 0.3),
    GPU("L40S", 48, 362, 0.86),
    GPU("A10G", 24, 70, 0.6),
    GPU("RTX-A6000", 48, 155, 0.77),
    GPU("RTX-3090", 24, 71, 0.94),
    GPU("RTX-4090", 24, 165, 1.01),
    GPU("RTX-5090", 32, 209, 1.79),
    GPU("MI300X", 192, 1307, 5.3),
)


def _words(name: str) -> set[str]:
    """Its words in small letters, `RTX` for itself where a number follows at once."""
    return set(re.findall(r"rtx|[a-z0-9]+", name.lower()))
