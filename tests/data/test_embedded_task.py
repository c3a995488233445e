import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import get_json_schema

from mt_grpo.data.embedded import corpus, tool
from mt_grpo.data.embedded.corpus import LABELS, SYSTEM_PROMPT, articles, entities, passages, problems, questions
from mt_grpo.data.embedded.tool import search
from mt_grpo.tools.search import CorpusSearch

MODEL_DIR = Path(corpus.__file__).with_name("model")
SPLITS = ("train", "validation")
ALL_PROBLEMS = [problem for split in SPLITS for problem in problems(split)]
NAMES = sorted({value[0] for e in entities().values() for value in e.facts.values()} | set(entities()))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


def test_facts_are_well_formed():
    text = re.compile(r"[A-Za-z0-9][A-Za-z0-9 .'-]*")
    for entity in entities().values():
        assert text.fullmatch(entity.name)
        assert entity.facts.keys() <= LABELS.keys()
        for values in entity.facts.values():
            assert values and len(set(values)) == len(values)
            assert all(text.fullmatch(value) and len(value.split()) <= 4 for value in values)


def test_names_are_unique():
    assert len(entities()) == len(re.findall(r'"name":', Path(corpus.__file__).with_name("facts.json").read_text()))
    assert len(entities()) >= 350


def test_passages_are_the_sentences_of_the_articles():
    assert len(set(passages())) == len(passages())
    told = {
        f"{article.title}: {part}" for article in articles() for part in re.findall(r"The .*?\.(?= |$)", article.text)
    }
    assert told == set(passages())


def test_counts():
    for split, least in (("train", 800), ("validation", 240)):
        hops = [row["hops"] for row in questions(split)]
        assert len(hops) >= least
        assert 0.4 <= hops.count(2) / len(hops) <= 0.6


def test_question_rows():
    row = next(
        row for split in SPLITS for row in questions(split) if "currency" in row["question"] and row["hops"] == 1
    )
    assert row.keys() == {"question", "answer", "hops"}
    assert isinstance(row["answer"], list) and row["answer"][0]


def test_questions_are_unique():
    assert len({problem.question for problem in ALL_PROBLEMS}) == len(ALL_PROBLEMS)


def test_splits_share_no_entity():
    train, validation = ({name for problem in problems(split) for name in problem.entities} for split in SPLITS)
    assert train and validation and not train & validation


def test_ideal_queries_find_their_passages():
    for problem in ALL_PROBLEMS:
        assert tuple(search(text) for text in problem.searches) == problem.passages


def test_the_last_passage_holds_the_answer():
    for problem in ALL_PROBLEMS:
        assert problem.passages[-1].endswith(f"{problem.answer[0]}.")


def test_two_hops_need_two_searches():
    for problem in ALL_PROBLEMS:
        if len(problem.searches) == 2:
            assert not problem.passages[0].endswith(f" {problem.answer[0]}.")
            assert problem.entities[-1] not in problem.searches[0]


def test_tool_schema():
    function = get_json_schema(search)["function"]
    assert function["name"] == "search"
    assert list(function["parameters"]["properties"]) == ["query"]


def test_tokenizer_round_trip(tokenizer):
    action = '<reasoning>find capital</reasoning>\n<tool>{"name": "search", "args": {"query": "capital Peru"}}</tool>'
    for text in [action, *passages(), *(problem.question for problem in ALL_PROBLEMS), "Été 東京 \t\n  x"]:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_names_are_few_tokens(tokenizer):
    lengths = [len(tokenizer.encode(name)) for name in NAMES]
    assert sum(length > 2 for length in lengths) <= len(lengths) / 100
    assert max(lengths) <= 5


def test_pieces_encode_like_the_whole(tokenizer):
    reply = "<|im_end|>\n<|im_start|>user\n<result>{}</result><|im_end|>\n<|im_start|>assistant\n"
    for problem in ALL_PROBLEMS[::50]:
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": problem.question}]
        pieces = [tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)]
        for text, found in zip(problem.searches, problem.passages, strict=True):
            pieces.append(f'<tool>{{"name": "search", "args": {{"query": "{text}"}}}}</tool>')
            pieces.append(reply.format(found))
        pieces.append(f"{problem.answer[0]}<|im_end|>")
        assert tokenizer.encode("".join(pieces)) == [token for piece in pieces for token in tokenizer.encode(piece)]


def test_special_tokens(tokenizer):
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    for name in ("reasoning", "tool", "result", "answer", "think", "tool_call", "tool_response"):
        for tag in (f"<{name}>", f"</{name}>"):
            assert len(tokenizer.encode(tag)) == 1
            assert tag not in tokenizer.all_special_tokens


def test_the_prompt_is_chatml(tokenizer):
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "Who?"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_model_loads(tokenizer):
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= 12e6
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    assert model.config.vocab_size == len(tokenizer)
    ids = tokenizer("What is the capital of Peru?", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, ids.shape[1], len(tokenizer))


def test_searches_from_many_threads_build_one_index(monkeypatch):
    built = []
    monkeypatch.setattr(tool, "CorpusSearch", lambda passages: built.append(1) or CorpusSearch(passages))
    tool._index.cache_clear()
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(tool.search, ["currency Peru"] * 16))
    assert len(set(results)) == 1 and len(built) == 1
    tool._index.cache_clear()
