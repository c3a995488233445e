"""The distributions that tokens are drawn from, by their definitions."""

import torch


def truncated(logits: torch.Tensor, seen: list[int], temperature=1.0, top_p=1.0, top_k=0, min_p=0.0,
              repetition_penalty=1.0) -> torch.Tensor:  # fmt: skip
    """The distribution of one position by its definition: penalty, temperature, then min-p, top-k and top-p."""
    logits = logits.clone()
    for token in set(seen):
        logits[token] *= repetition_penalty if logits[token] < 0 else 1 / repetition_penalty
    probabilities = (logits / temperature).softmax(0)

    def keep(chosen: torch.Tensor) -> torch.Tensor:
        kept = torch.where(chosen, probabilities, 0.0)
        return kept / kept.sum()

    probabilities = keep(probabilities >= min_p * probabilities.max())
    if top_k:
        probabilities = keep(probabilities >= probabilities.sort().values[-top_k])
    if top_p < 1:
        order = probabilities.argsort(descending=True)
        before = probabilities[order].cumsum(0) - probabilities[order]
        chosen = torch.zeros_like(probabilities, dtype=torch.bool)
        chosen[order[before < top_p]] = True
        probabilities = keep(chosen)
    return probabilities
