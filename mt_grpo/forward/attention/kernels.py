"""The attention kernels by name. All compute the same rule: `token q sees token k iff k <= q <= subtree_end[k]`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mt_grpo.imports import Registry

Kernel = Callable[..., Tensor]
"""`(layout: TreeLayout, query, key, value, scaling: float, window: int | None) -> (1, heads, N, head_dim)`."""

KERNELS: Registry[Kernel] = Registry("attention kernel", "mt_grpo.forward.attention")
"""The names that `tree_attention` knows, besides `auto`."""


def attention_kernel(name: str) -> Callable[[Kernel], Kernel]:
    """
    Registers an attention kernel under a name.

    Raises:
        RegistrationError: If the name is no word, or another file has registered it.
    """
    return KERNELS.register(name)
