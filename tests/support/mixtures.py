"""Random mixtures of experts, and engines and copies whose routers choose differently."""

import copy
from typing import Any

import torch
import transformers as hf
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from mt_grpo.forward.routes import route_shape
from mt_grpo.rollout.engines.transformers import TransformersEngine

_SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "max_position_embeddings": 512}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 8, "num_experts": 8, "moe_intermediate_size": 16, "mlp_only_layers": [0]}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "deepseek_v3": ("DeepseekV3", {"num_key_value_heads": 4, "moe_intermediate_size": 16, **_GROUPS, **_LATENT}),
}
"""How the classes of models begin, and their sizes."""


def build_mixture(name: str = "qwen3_moe", vocabulary: int = 64, seed: int = 0, **more: Any) -> PreTrainedModel:
    """A mixture of a few thousand parameters, random enough to have opinions."""
    family, own = MIXTURES[name]
    torch.manual_seed(seed)
    config = getattr(hf, f"{family}Config")(**{"vocab_size": vocabulary, **_SIZES, **own, **more})
    model = getattr(hf, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


class Flips(TorchFunctionMode):
    """Rounds the scores of experts differently, as other kernels do, so that some tokens go to others."""

    def __init__(self, experts: int, noise: float) -> None:
        super().__init__()
        self._experts, self._noise = experts, noise

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.topk or args[0].size(-1) != self._experts:
            return function(*args, **(kwargs or {}))
        rounded = args[0] + self._noise * torch.sin(1e4 * args[0])  # the same for the same token and history
        indices = function(rounded, *args[1:], **(kwargs or {})).indices
        return args[0].gather(-1, indices), indices


class FlippingEngine(TransformersEngine):
    """Samples with the same weights as the trainer, and with routers that flip."""

    noise = 0.05

    def _generate(self, *args) -> None:
        with Flips(route_shape(self.model.config).experts, self.noise):
            super()._generate(*args)


def with_other_routers(model: PreTrainedModel, noise: float = 0.05) -> PreTrainedModel:
    """A copy that sends some tokens to other experts."""
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if name.endswith("gate.weight"):
                parameter += noise * torch.randn_like(parameter)
    return other
