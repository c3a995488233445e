"""Builds the tokenizer and the small model of the embedded task and warm-starts the model on made-up traces.

    python scripts/warm_start.py                 # build, train, save, evaluate
    python scripts/warm_start.py --evaluate      # evaluate the saved model

The traces teach skills, never facts: their subjects and values are names drawn at random from the whole corpus, so
the only way to a right answer is to copy from the question and from search results. A first phase shows flawless traces
until the skills are there; a second phase mixes in bad habits, independent of the question, which leave reinforcement
learning something to unlearn. Evaluation samples at temperature 1 on real validation questions with real search.
"""

import argparse
import json
import math
import random
import re
import time
from pathlib import Path

import tokenizers
import torch
import trl
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from mt_grpo.data.embedded.corpus import LABELS, entities, passage, passages
from mt_grpo.data.embedded.questions import (
    KEYS,
    LINKS,
    SYSTEM_PROMPT,
    Form,
    Problem,
    inverse_forms,
    link_forms,
    one_hop_forms,
    problems,
    query,
)
from mt_grpo.data.embedded.tool import search

MODEL_DIR = Path(__file__).parents[1] / "mt_grpo/data/embedded/model"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["reasoning", "tool", "result", "answer", "think", "tool_call", "tool_response"]
VOCABULARY = 4032
PROMPT = (
    f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>\n<|im_start|>assistant\n"
)
REPLY = "<|im_end|>\n<|im_start|>user\n<result>{}</result><|im_end|>\n<|im_start|>assistant\n"
MAX_TURNS = 4
MAX_ACTION_TOKENS = 64

Trace = list[tuple[str, bool]]
"""Pieces of a conversation in order, each with whether the assistant wrote it."""


def names() -> list[str]:
    """Every subject and canonical value of the corpus, sorted."""
    values = {value[0] for entity in entities().values() for value in entity.facts.values()}
    return sorted(values | set(entities()))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE whose merges favour the names of the corpus.

    A capitalised name is cut off from the space before it, and its words stay together. So a name is the same tokens in
    a query, after a tag and in a sentence, and copying it is a matter of repeating them.
    """
    word = "[A-Z][A-Za-z'-]*"
    pattern = rf"{word}(?: (?:of |de |la |in )?{word})*| ?[a-z]+|\d+| ?[^\sA-Za-z\d]+|\s"
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    pieces = [piece for _ in range(4000) for piece, _ in make_trace(rng, habits=True)]
    text = [re.sub(r"</?\w+>|<\|\w+\|>", "", piece) for piece in pieces]
    text += passages() + [name for name in names() for _ in range(8)] + [f"the {name}" for name in names()]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - 2 * len(TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(
        [tokenizers.AddedToken(tag, normalized=False) for name in TAGS for tag in (f"<{name}>", f"</{name}>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        chat_template=(Path(trl.__file__).parent / "chat_templates/qwen3.jinja").read_text(),
    )


def forms(hops: int) -> list[Form]:
    """All kinds of questions with that many hops."""
    relations: dict[str, set[str]] = {}
    for entity in entities().values():
        relations.setdefault(entity.family, set()).update(entity.facts)
    if hops == 1:
        return [form for relation in LABELS for form in one_hop_forms(relation)]
    found = [
        form
        for family, keys in KEYS.items()
        for key in keys
        for relation in sorted(relations[family] - {key})
        for form in inverse_forms(family, key, relation)
    ]
    for link in LINKS:
        target = "country" if link in ("country", "homeland") else "person"
        found += [form for relation in sorted(relations[target]) for form in link_forms(link, relation)]
    return found


FORMS = {hops: forms(hops) for hops in (1, 2)}
NAMES = names()


def call(text: str, reasoning: str) -> str:
    """A well-formed search."""
    body = json.dumps({"name": "search", "args": {"query": text}})
    return f"<reasoning>{reasoning}</reasoning>\n<tool>{body}</tool>"


def malformed_call(rng: random.Random, text: str, reasoning: str) -> tuple[str, str]:
    """A call that cannot be executed, and an error message for it."""
    body, error = rng.choice(
        [
            (f'{{"name": "search", "args": {{"query": "{text}"}}', "invalid JSON"),
            (f'{{"name": "search", "args": {{"query": {text}}}}}', "the call is not valid JSON"),
            (f'{{"name": "lookup", "args": {{"query": "{text}"}}}}', "unknown tool 'lookup'"),
            (f'{{"name": "lookup", "args": {{"query": "{text}"}}}}', "there is no tool named lookup"),
            (f'{{"name": "search", "args": {{"text": "{text}"}}}}', "missing argument 'query'"),
            ('{"name": "search", "args": {}}', "missing a required argument: 'query'"),
        ]
    )
    return f"<reasoning>{reasoning}</reasoning>\n<tool>{body}</tool>", f"Error: {error}"


def answer(text: str, reasoning: str = "done") -> str:
    """A well-formed final action."""
    return f"<reasoning>{reasoning}</reasoning>\n<answer>{text}</answer>"


def make_trace(rng: random.Random, habits: bool) -> Trace:
    """One conversation about names drawn at random.

    Args:
        rng: source of all choices.
        habits: whether mistakes are mixed in, at most one search of a conversation going wrong.
    """
    form = rng.choice(FORMS[rng.choice((1, 2))])
    given, bridge, value, other = rng.sample(NAMES, 4)
    steps = [(form.relations[0], given, passage(form.relations[0], given, value))]
    if len(form.relations) == 2:
        first = (bridge, given) if form.inverse else (given, bridge)
        steps = [
            (form.relations[0], given, passage(form.relations[0], *first)),
            (form.relations[1], bridge, passage(form.relations[1], bridge, value)),
        ]
    trace = [(PROMPT.format(form.text.format(given)), False)]
    slipped = not habits
    for hop, (relation, name, found) in enumerate(steps):
        thought = f"find {LABELS[relation]}"
        luck = rng.random()
        if habits and hop == 0 and luck < 0.20:
            return [*trace, (answer(other, "guess"), True)]
        if habits and hop == 1 and luck < 0.12:
            return [*trace, (answer(bridge), True)]
        if not slipped and luck < (0.60, 0.32)[hop]:
            slipped = True
            wrong, seen = rng.choice(sorted(LABELS.keys() - {relation})), rng.choice(NAMES)
            kind = rng.random()
            if kind < 0.5:
                action, result = malformed_call(rng, query(relation, name), thought)
            elif kind < 0.75:
                action, result = call(query(wrong, name), f"find {LABELS[wrong]}"), passage(wrong, name, seen)
            else:
                action = call(query(relation, other), thought)
                result = rng.choice([passage(relation, other, seen), passage(wrong, other, seen), "No results."])
            trace += [(action, True), (REPLY.format(result), False)]
            if rng.random() < 0.6:
                return [*trace, (answer(other if kind < 0.5 else seen), True)]
        trace += [(call(query(relation, name), thought), True), (REPLY.format(found), False)]
    if habits and rng.random() < 0.15:
        return [*trace, (f"<reasoning>done</reasoning>\n{value}<|im_end|>", True)]
    return [*trace, (answer(value), True)]


def make_batches(rng: random.Random, tokenizer, habits: bool, count: int, size: int) -> list[tuple]:
    """`count` batches of token ids and loss mask, both `[size, length]`, of traces of similar lengths."""
    rows = []
    for _ in range(count * size):
        ids, mask = [], []
        # Pieces are encoded one by one, as they are when a conversation is sampled.
        for piece, learn in make_trace(rng, habits):
            encoded = tokenizer.encode(piece)
            ids += encoded
            mask += [learn] * len(encoded)
        rows.append((ids, mask))
    rows.sort(key=lambda row: len(row[0]))
    batches = []
    for start in range(0, len(rows), size):
        chunk = rows[start : start + size]
        length = len(chunk[-1][0])
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row, _ in chunk])
        mask = torch.tensor([row + [False] * (length - len(row)) for _, row in chunk])
        batches.append((ids, mask))
    rng.shuffle(batches)
    return batches


def train(tokenizer, steps: int, habit_steps: int, size: int, peak: float) -> Qwen3ForCausalLM:
    """Trains a fresh model: `steps` in all, the last `habit_steps` of them with bad habits."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    print(f"{model.num_parameters():,} parameters, vocabulary {len(tokenizer)}", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    rng = random.Random(1)
    batches: list[tuple] = []
    started, losses = time.time(), []
    for step in range(steps):
        if step == steps - habit_steps:
            batches = []
        batches = batches or make_batches(rng, tokenizer, step >= steps - habit_steps, 8, size)
        ids, mask = batches.pop()
        rate = min((step + 1) / 60, 0.05 + 0.95 * (1 + math.cos(math.pi * max(0, step / steps - 0.4) / 0.6)) / 2)
        optimizer.param_groups[0]["lr"] = peak * rate
        hidden = model.model(ids[:, :-1]).last_hidden_state[mask[:, 1:]]
        logits, target = model.lm_head(hidden), ids[:, 1:][mask[:, 1:]]
        loss = torch.nn.functional.cross_entropy(logits, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 50 == 49:
            mean = sum(losses[-50:]) / 50
            right = (logits.argmax(-1) == target).float().mean().item()
            print(f"step {step + 1}  loss {mean:.3f}  tokens {right:.3f}  {time.time() - started:.0f} s", flush=True)
    return model.eval()


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
    conversations = [turns for i in range(0, len(asked), 128) for turns in sample(model, tokenizer, asked[i : i + 128])]
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
        print(f"{hops} hop, {len(rows)} questions:", *(f"{k} {sum(v) / len(v):.3f}" for k, v in mean.items()), sep="\n  ")
    for problem, turns in list(zip(asked, conversations, strict=True))[:: len(asked) // max(examples, 1)]:
        print(problem.question, problem.answer, *(f"    {action!r} -> {result!r}" for action, result, _ in turns), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluate", action="store_true", help="only evaluate the saved model")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--habit-steps", type=int, default=300)
    parser.add_argument("--output", type=Path, default=MODEL_DIR)
    args = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    if args.evaluate:
        tokenizer = AutoTokenizer.from_pretrained(args.output)
        model = Qwen3ForCausalLM.from_pretrained(args.output).eval()
    else:
        tokenizer = build_tokenizer()
        model = train(tokenizer, args.steps, args.habit_steps, size=48, peak=2e-3)
        model.generation_config.update(do_sample=True, temperature=1.0)
        tokenizer.save_pretrained(args.output)
        model.save_pretrained(args.output)
    evaluate(model, tokenizer)


if __name__ == "__main__":
    main()
