"""The embedded task: its facts and questions, its search, and its model."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from mt_grpo.data.embedded import corpus, tool
from mt_grpo.data.embedded.corpus import LABELS, SYSTEM_PROMPT, entities, passages, problems, questions
from mt_grpo.data.embedded.tool import search
from mt_grpo.tools.search import CorpusSearch

MODEL_DIR = Path(corpus.__file__).with_name("model")
SPLITS = ("train", "validation")
ALL_PROBLEMS = [problem for split in SPLITS for problem in problems(split)]
NAMES = sorted({value[0] for e in entities().values() for value in e.facts.values()} | set(entities()))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


def test_facts_are_well_formed_and_names_unique():
    text = re.compile(r"[A-Za-z0-9][A-Za-z0-9 .'-]*")
    for entity in entities().values():
        assert text.fullmatch(entity.name) and entity.facts.keys() <= LABELS.keys()
        for values in entity.facts.values():
            assert values and len(set(values)) == len(values)
            assert all(text.fullmatch(value) and len(value.split()) <= 4 for value in values)
    named = re.findall(r'"name":', Path(corpus.__file__).with_name("facts.json").read_text())
    assert len(entities()) == len(named) >= 350


def test_each_fact_is_a_passage_with_its_subject_as_title():
    assert len(set(passages())) == len(passages()) == sum(len(entity.facts) for entity in entities().values())
    for passage in passages():
        title, text = passage.split(": ", 1)
        assert title in entities() and re.fullmatch(rf"The .+ of {re.escape(title)} is .+\.", text)


@pytest.mark.parametrize(("split", "least"), [("train", 800), ("validation", 240)])
def test_half_of_the_questions_have_two_hops(split, least):
    hops = [row["hops"] for row in questions(split)]
    assert len(hops) >= least and 0.4 <= hops.count(2) / len(hops) <= 0.6
    row = next(row for row in questions(split) if row["hops"] == 1)
    assert row.keys() == {"question", "answer", "hops"} and isinstance(row["answer"], list) and row["answer"][0]


def test_questions_are_unique_and_splits_share_no_entity():
    assert len({problem.question for problem in ALL_PROBLEMS}) == len(ALL_PROBLEMS)
    train, validation = ({name for problem in problems(split) for name in problem.entities} for split in SPLITS)
    assert train and validation and not train & validation


def test_ideal_queries_lead_to_the_answer_in_the_last_passage():
    for problem in ALL_PROBLEMS:
        assert tuple(search(text) for text in problem.searches) == problem.passages
        assert problem.passages[-1].endswith(f"{problem.answer[0]}.")
        if len(problem.searches) == 2:  # one would not do
            assert not problem.passages[0].endswith(f" {problem.answer[0]}.")
            assert problem.entities[-1] not in problem.searches[0]


def test_the_tokenizer_loses_nothing_and_knows_names_and_tags(tokenizer):
    action = '<reasoning>find capital</reasoning>\n<tool>{"name": "search", "args": {"query": "capital Peru"}}</tool>'
    for text in [action, *passages(), *(problem.question for problem in ALL_PROBLEMS), "Été 東京 \t\n  x"]:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    lengths = [len(tokenizer.encode(name)) for name in NAMES]
    assert sum(length > 2 for length in lengths) <= len(lengths) / 100 and max(lengths) <= 5
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    for name in ("reasoning", "tool", "result", "answer", "think", "tool_call", "tool_response"):
        for tag in (f"<{name}>", f"</{name}>"):
            assert len(tokenizer.encode(tag)) == 1 and tag not in tokenizer.all_special_tokens


def asked(tokenizer, question):
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_pieces_of_chatml_encode_like_the_whole(tokenizer):
    assert asked(tokenizer, "Who?") == (
        f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    )
    reply = "<|im_end|>\n<|im_start|>user\n<result>{}</result><|im_end|>\n<|im_start|>assistant\n"
    for problem in ALL_PROBLEMS[::50]:
        pieces = [asked(tokenizer, problem.question)]
        for text, found in zip(problem.searches, problem.passages, strict=True):
            pieces += [f'<tool>{{"name": "search", "args": {{"query": "{text}"}}}}</tool>', reply.format(found)]
        pieces.append(f"{problem.answer[0]}<|im_end|>")
        assert tokenizer.encode("".join(pieces)) == [token for piece in pieces for token in tokenizer.encode(piece)]


def test_the_model_loads(tokenizer):
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= 12e6
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    ids = tokenizer("What is the capital of Peru?", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, ids.shape[1], len(tokenizer)) and model.config.vocab_size == len(tokenizer)


def test_searches_from_many_threads_build_one_index(monkeypatch):
    built = []
    monkeypatch.setattr(tool, "CorpusSearch", lambda passages: built.append(1) or CorpusSearch(passages))
    tool._index.cache_clear()
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(tool.search, ["currency Peru"] * 16))
    assert len(set(results)) == 1 and len(built) == 1
    tool._index.cache_clear()
