# Two stages, as in production: the trainer on its GPUs, the vLLM server on its own. Both install with scripts/install.sh.
#   docker build --target trainer -t mt-grpo-trainer .
#   docker build --target server  -t mt-grpo-server .
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS base
RUN apt-get update && apt-get install --yes --no-install-recommends \
        build-essential git python3 python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /workspace
COPY pyproject.toml README.md LICENSE ./
COPY mt_grpo mt_grpo
COPY scripts scripts

FROM base AS trainer
RUN scripts/install.sh /opt/venv ".[deepspeed]"
COPY recipes recipes
ENV PATH=/opt/venv/bin:$PATH
ENTRYPOINT ["accelerate", "launch"]
CMD ["--config_file", "recipes/accelerate/zero3.yaml", "scripts/train.py", "--config", "recipes/Qwen/triviaqa_7b.yaml"]

FROM base AS server
# vLLM pins its own torch
RUN TORCH="" scripts/install.sh /opt/venv ".[vllm]"
COPY recipes recipes
ENV PATH=/opt/venv/bin:$PATH
ENTRYPOINT ["mt-grpo", "serve"]
CMD ["--config", "recipes/Qwen/triviaqa_7b.yaml"]
