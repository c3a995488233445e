"""Builds the tokenizer and the small model of the embedded task and warm-starts the model on made-up traces.

    python scripts/warm_start.py                 # build, train, save, evaluate
    python scripts/warm_start.py --evaluate      # evaluate the saved model

The traces teach skills, never facts: their subjects and values are names drawn at random from the whole corpus, so
the only way to a right answer is to copy from the question and from search results. The first phases show flawless
traces until the skills are there; the last one mixes in bad habits, independent of the question, which leave
reinforcement learning something to unlearn. Evaluation samples at temperature 1 on real validation questions with real
search.
"""

import argparse
import json
import math
import random
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
import trl
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from warm_start_traces import NAMES, PROMPT, REPLY, make_trace

from mt_grpo.data.embedded.corpus import Problem, passages, problems
from mt_grpo.data.embedded.tool import search

MODEL_DIR = Path(__file__).parents[1] / "mt_grpo/data/embedded/model"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["reasoning", "tool", "result", "answer", "think", "tool_call", "tool_response"]
VOCABULARY = 4032
SIZE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MAX_TURNS = 4
MAX_ACTION_TOKENS = 64


@dataclass(frozen=True)
class Phase:
    """A stretch of training on one kind of traces: hops to draw from, whether with bad habits, and how to step."""

    hops: tuple[int, ...]
    habits: bool
    steps: int
    size: int
    rate: float
    decay: bool = False


PHASES = (
    Phase((1,), False, 200, 32, 2e-3),
    Phase((1,), False, 101, 32, 2e-3),
    Phase((1, 2), False, 152, 32, 2e-3),
    Phase((1, 2, 2), False, 500, 32, 2e-3, decay=True),
    Phase((1, 2, 2), True, 150, 32, 5e-4, decay=True),
)


def build_tokenizer(
    texts: Iterable[str], pattern: str, vocabulary: int, added: Sequence[tokenizers.AddedToken] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level BPE over words that a pattern cuts out, whose merges favour the texts; `added` are tokens too."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIAL) - 2 * len(TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([re.sub(r"</?\w+>|<\|\w+\|>", "", text) for text in texts], trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(
        [tokenizers.AddedToken(tag, normalized=False) for name in TAGS for tag in (f"<{name}>", f"</{name}>")]
    )
    tokenizer.add_tokens(list(added))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        chat_template=(Path(trl.__file__).parent / "chat_templates/qwen3.jinja").read_text(),
    )


def tokenizer_of_names() -> PreTrainedTokenizerFast:
    """The tokenizer of the embedded task.

    A capitalised name is cut off from the space before it, and its words stay together. So a name is the same tokens
    in a query, after a tag and in a sentence, and copying it is a matter of repeating them.
    """
    word = "[A-Z][A-Za-z'-]*"
    pattern = rf"{word}(?: (?:of |de |la |in )?{word})*| ?[a-z]+|\d+| ?[^\sA-Za-z\d]+|\s"
    rng = random.Random(0)
    texts = [piece for _ in range(4000) for piece, _ in make_trace(rng, (1, 2), habits=True)]
    texts += passages() + [name for name in NAMES for _ in range(8)] + [f"the {name}" for name in NAMES]
    return build_tokenizer(texts, pattern, VOCABULARY)


def make_batches(rng: random.Random, tokenizer, phase: Phase, trace=make_trace, count: int = 8) -> list[tuple]:
    """`count` batches of token ids and loss mask, both `[size, length]`, of traces of similar lengths."""
    rows = []
    for _ in range(count * phase.size):
        ids, mask = [], []
        # Pieces are encoded one by one, as they are when a conversation is sampled.
        for piece, learn in trace(rng, phase.hops, phase.habits):
            encoded = tokenizer.encode(piece)
            ids += encoded
            mask += [learn] * len(encoded)
        rows.append((ids, mask))
    rows.sort(key=lambda row: len(row[0]))
    batches = []
    for start in range(0, len(rows), phase.size):
        chunk = rows[start : start + phase.size]
        length = len(chunk[-1][0])
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row, _ in chunk])
        mask = torch.tensor([row + [False] * (length - len(row)) for _, row in chunk])
        batches.append((ids, mask))
    rng.shuffle(batches)
    return batches


def new_model(tokenizer, **size: int) -> Qwen3ForCausalLM:
    """An untrained model, started where copying is close by.

    Rows of the (tied) embedding are long enough for confident predictions, and the output projection of each attention
    head is the transpose of its value projection: what a head attends to becomes more likely to be said.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        **(SIZE | size),
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.08,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    for layer in model.model.layers:
        attention = layer.self_attn
        values = attention.v_proj.weight.data.view(config.num_key_value_heads, config.head_dim, config.hidden_size)
        per_head = values.repeat_interleave(attention.num_key_value_groups, dim=0)
        attention.o_proj.weight.data.copy_(per_head.flatten(0, 1).T)
    return model


def train(model, tokenizer, phase: Phase, trace=make_trace) -> None:
    """Trains `model` through one phase, with the loss on the assistant's tokens only."""
    print(phase, flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=phase.rate, betas=(0.9, 0.98), weight_decay=0.01)
    # Phases differ in length, so that each draws traces of its own.
    rng = random.Random(phase.steps)
    batches: list[tuple] = []
    started, losses, hits = time.time(), [], []
    for step in range(phase.steps):
        batches = batches or make_batches(rng, tokenizer, phase, trace)
        ids, mask = batches.pop()
        decay = (1 + math.cos(math.pi * step / phase.steps)) / 2 if phase.decay else 1.0
        optimizer.param_groups[0]["lr"] = phase.rate * min((step + 1) / 40, decay)
        hidden = model.model(ids[:, :-1]).last_hidden_state[mask[:, 1:]]
        logits, target = model.lm_head(hidden), ids[:, 1:][mask[:, 1:]]
        loss = torch.nn.functional.cross_entropy(logits, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        hits.append((logits.argmax(-1) == target).float().mean().item())
        if step % 50 == 49:
            loss, right = sum(losses[-50:]) / 50, sum(hits[-50:]) / 50
            seconds = time.time() - started
            print(f"step {step + 1}  loss {loss:.3f}  right tokens {right:.4f}  {seconds:.0f} s", flush=True)


def execute(action: str) -> tuple[str, bool]:
    """Result of the call in `action`, and whether it could be executed."""
    try:
        parsed = json.loads(action.split("<tool>")[-1].removesuffix("</tool>"))
        if parsed["name"] != "search":
            return f"Error: unknown tool '{parsed['name']}'", False
        return search(parsed["args"]["query"]), True
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"Error: {error}", False


@torch.no_grad()
def sample(model, tokenizer, asked: list[Problem]) -> list[list[tuple[str, str, bool]]]:
    """Samples one conversation per problem at temperature 1.

    All rows start at position 0 and advance together: a row is fed from its given tokens while it has some, else from
    its own sample, so that no row needs padding in the cache.

    Returns:
        per problem its turns: action, result ("" for the last action) and whether the result came from a search.
    """
    ids = [tokenizer.encode(PROMPT.format(problem.question)) for problem in asked]
    begin = [len(row) for row in ids]
    turns: list[list] = [[] for _ in asked]
    done = [False] * len(asked)
    stops = set(tokenizer.convert_tokens_to_ids(["</tool>", "</answer>", "<|im_end|>"]))
    cache, position = None, 0
    while not all(done):
        column = torch.tensor([[row[position] if position < len(row) else 0] for row in ids])
        output = model(column, past_key_values=cache, use_cache=True)
        cache, position = output.past_key_values, position + 1
        drawn = torch.multinomial(output.logits[:, -1].softmax(-1), 1)[:, 0].tolist()
        for i, row in enumerate(ids):
            if done[i] or position < len(row):
                continue
            row.append(drawn[i])
            if drawn[i] not in stops and len(row) - begin[i] < MAX_ACTION_TOKENS:
                continue
            action = tokenizer.decode(row[begin[i] :])
            if action.endswith("</tool>"):
                result, worked = execute(action)
                row += tokenizer.encode(REPLY.format(result))
                begin[i] = len(row)
            else:
                result, worked = "", False
            turns[i].append((action, result, worked))
            done[i] = not result or len(turns[i]) == MAX_TURNS
    return turns


def evaluate(model, tokenizer, examples: int = 3) -> None:
    """Prints the rates of sampled conversations on all validation questions."""
    asked = list(problems("validation"))
    conversations = [
        turns for i in range(0, len(asked), 128) for turns in sample(model, tokenizer, asked[i : i + 128])
    ]
    for hops in (1, 2):
        rows = [(p, turns) for p, turns in zip(asked, conversations, strict=True) if len(p.searches) == hops]
        correct, flawless, able, calls = [], [], [], []
        for problem, turns in rows:
            last = re.fullmatch(r"(?s).*<answer>(.*)</answer>", turns[-1][0])
            correct.append(bool(last) and last[1].lower() in [text.lower() for text in problem.answer])
            made = [worked for action, _, worked in turns if action.endswith("</tool>")]
            calls.append(sum(made) / len(made) if made else 0.0)
            # Right queries and a final action in the right form: what is left to fail is the copying of the answer.
            proper = bool(last) and tuple(result for _, result, _ in turns[:-1]) == problem.passages
            if proper:
                able.append(correct[-1])
            flawless.append(proper and correct[-1])
        mean = {
            "exact match": correct,
            "everything right": flawless,
            "exact match given right searches": able,
            "tool execution": calls,
        }
        print(
            f"{hops} hop, {len(rows)} questions:", *(f"{k} {sum(v) / len(v):.3f}" for k, v in mean.items()), sep="\n  "
        )
    for problem, turns in list(zip(asked, conversations, strict=True))[:: len(asked) // max(examples, 1)]:
        print(
            problem.question,
            problem.answer,
            *(f"    {action!r} -> {result!r}" for action, result, _ in turns),
            sep="\n",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluate", action="store_true", help="only evaluate the saved model")
    parser.add_argument("--output", type=Path, default=MODEL_DIR)
    args = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    if args.evaluate:
        tokenizer = AutoTokenizer.from_pretrained(args.output)
        model = Qwen3ForCausalLM.from_pretrained(args.output).eval()
    else:
        tokenizer = tokenizer_of_names()
        model = new_model(tokenizer)
        print(f"{model.num_parameters():,} parameters, vocabulary {len(tokenizer)}", flush=True)
        for phase in PHASES:
            train(model, tokenizer, phase)
        model.eval()
        model.generation_config.update(do_sample=True, temperature=1.0)
        tokenizer.save_pretrained(args.output)
        model.save_pretrained(args.output)
    evaluate(model, tokenizer)


if __name__ == "__main__":
    main()
