"""Log-probabilities and entropies from hidden states, forward and backward: TRL's fused head against ours on a CPU."""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from common import write
from measure import interleave, peak_memory, ratio
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from mt_grpo.forward.lm_head import chunked_logps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    size, hidden, vocabulary = 1024, 256, 8192
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=8,
            tie_word_embeddings=False,
        )
    )
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    model.model.forward = lambda states, **kwargs: type("Output", (), {"last_hidden_state": states})()  # head only
    weight = model.lm_head.weight
    states = torch.randn(1, size, hidden)
    tokens = torch.randint(vocabulary, (1, size))
    results = []
    print("| trained | TRL | ours | ratio | memory, MiB |")
    print("| --- | --- | --- | --- | --- |")
    for share in (0.05, 0.22):
        trained = torch.rand(1, size) < share
        trained[:, 0] = False
        labels = tokens.masked_fill(~trained, -100)
        places = trained[0].nonzero().squeeze(1)

        def gradients(
            ours: bool, labels: torch.Tensor = labels, places: torch.Tensor = places
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            inputs = states.clone().requires_grad_()
            if ours:
                logps, entropies = chunked_logps(inputs[0, places - 1], weight, None, labels[0, places])
            else:
                output = model(inputs, labels=labels, fused_lm_head=True)
                logps, entropies = output.log_probs, output.entropy
            loss = logps.sum()
            return loss.detach(), entropies.detach().sum(), *torch.autograd.grad(loss, [inputs, weight])

        for our, their in zip(gradients(True), gradients(False), strict=True):
            torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-4)
        functions = {"trl": lambda run=gradients: run(False), "ours": lambda run=gradients: run(True)}
        memory = {name: peak_memory(function, "cpu") for name, function in functions.items()}
        seconds = interleave(functions, args.repeats, time.process_time)
        speed = ratio(seconds, "trl", "ours")
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        print(
            f"| {len(places) / size:.0%} | {medians['trl']:.3f} s | {medians['ours']:.3f} s "
            f"| {speed['median']:.1f} (min {speed['minimum']:.1f}) | {memory['trl']} / {memory['ours']} |",
            flush=True,
        )
        results.append({"trained": len(places) / size, "seconds": seconds, "ratio": speed, "peak_mib": memory})
    settings = {"tokens": size, "hidden": hidden, "vocabulary": vocabulary, "seed": 0, "threads": args.threads}
    write("head", settings, results)


if __name__ == "__main__":
    main()
