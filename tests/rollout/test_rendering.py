"""Chat rendering: prompt ids, sampled ids and reply ids together are what the template itself would write."""

from __future__ import annotations

import re

import pytest
from support.models import TEMPLATES, build_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from mt_grpo.rollout import ChatRenderer, TemplateError

NAMES = ["qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1"]
USER = {"role": "user", "content": "What is the capital of Peru"}


def renderer(name: str, **options) -> ChatRenderer:
    """One with the special tokens of its template."""
    tokenizer = build_tokenizer(name)
    marks = sorted(set(re.findall(r"<\|\w+\|>", (TEMPLATES / f"{name}.jinja").read_text())))
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks])
    if "<|eot_id|>" in marks:
        tokenizer.add_special_tokens({"eos_token": "<|eot_id|>", "bos_token": "<|endoftext|>"})
    return ChatRenderer(tokenizer, **options)


def full_ids(chat: ChatRenderer, messages: list[dict]) -> list[int]:
    return chat.tokenizer.apply_chat_template(
        messages, tools=chat.tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )


def called(*queries: str) -> dict:
    calls = [
        {"type": "function", "id": f"call_{index}", "function": {"name": "lookup", "arguments": {"query": query}}}
        for index, query in enumerate(queries)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def answered(*results: str) -> list[dict]:
    return [
        {"role": "tool", "name": "lookup", "tool_call_id": f"call_{index}", "content": result}
        for index, result in enumerate(results)
    ]


def words(chat: ChatRenderer, history: list[dict], exchange: list[dict]) -> str:
    """What the template writes for an assistant turn in the past, up to the token that ends it."""
    prompt, text = (
        chat.tokenizer.apply_chat_template(messages, tools=chat.tools, add_generation_prompt=True, tokenize=False)
        for messages in (history, [*history, *exchange])
    )
    assert text.startswith(prompt)
    return text[len(prompt) : text.index(chat.end_of_turn, len(prompt))]


def converse(chat: ChatRenderer, exchanges: list[tuple[dict, list[dict]]], ended: bool) -> list[int]:
    """Ids as the runner builds them, from what a model would sample; `ended` by its own end token or without."""
    history, ids = [USER], chat.prompt_ids([USER])
    for assistant, replies in exchanges:
        sampled = chat.tokenizer.encode(words(chat, history, [assistant, *replies]), add_special_tokens=False)
        if ended:
            sampled.append(chat.tokenizer.convert_tokens_to_ids(chat.end_of_turn))
        ids = ids + sampled + chat.reply_ids(replies, sampled[-1])
        history += [assistant, *replies]
    assert chat.tokenizer.decode(ids) == chat.tokenizer.decode(full_ids(chat, history))
    assert ids == full_ids(chat, history)
    return ids


@pytest.mark.parametrize("ended", [True, False], ids=["end token", "stop string"])
@pytest.mark.parametrize("name", NAMES)
def test_user_replies_continue_as_the_template_writes_them(name, ended):
    said = {"role": "assistant", "content": '<reasoning>why</reasoning><tool>{"name": "search"}</tool>'}
    reply = [{"role": "user", "content": "<result>Lima, Perú 🙂</result>"}]
    converse(renderer(name), [(said, reply), (said, reply), (said, reply)], ended)


@pytest.mark.parametrize("ended", [True, False], ids=["end token", "stop string"])
@pytest.mark.parametrize("name", NAMES)
def test_a_tool_reply_continues_as_the_template_writes_it(name, ended):
    converse(renderer(name), [(called("Lima"), answered("a result")), (called("x"), answered("{}"))], ended)


@pytest.mark.parametrize("ended", [True, False], ids=["end token", "stop string"])
@pytest.mark.parametrize("name", NAMES[:3])  # llama3_1 refuses two calls in a turn
def test_tool_replies_in_a_row_continue_as_the_template_writes(name, ended):
    exchange = called("Lima", "Peru", "Cusco"), answered("one", "two", "three")
    converse(renderer(name), [exchange, (called("x"), answered("four")), exchange], ended)


def test_tools_are_written_into_the_prompt_once():
    schema = {"type": "function", "function": {"name": "lookup", "description": "Looks up.", "parameters": {}}}
    chat = renderer("qwen3", tools=[schema])
    ids = converse(chat, [(called("Lima"), answered("a result"))], ended=True)
    assert chat.tokenizer.decode(ids).count("Looks up.") == 1


def test_members_of_a_group_share_their_prompts_ids():
    chat = renderer("qwen3")
    assert chat.prompt_ids([USER]) is chat.prompt_ids([dict(USER)]) and chat.prompt_ids([USER]) == full_ids(
        chat, [USER]
    )
    assert chat.prompt_ids([{**USER, "content": "other"}]) != chat.prompt_ids([USER])


def test_an_end_token_is_written_only_where_none_was_sampled():
    chat = renderer("qwen3")
    end = chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    reply = [{"role": "user", "content": "go on"}]
    written = chat.reply_ids(reply, last_id=5)
    assert written[0] == end and written.count(end) == 2
    assert chat.reply_ids(reply, last_id=end) == written[1:]


def test_a_reply_that_quotes_the_end_of_a_turn_is_kept_whole():
    chat = renderer("qwen3")
    reply = [{"role": "user", "content": "An assistant turn.<|im_end|> and a_tool_it_calls, again"}]
    assert "An assistant turn.<|im_end|> and a_tool_it_calls, again" in chat.tokenizer.decode(chat.reply_ids(reply, 5))


def test_text_keeps_special_tokens_except_the_end_of_turn():
    chat = renderer("qwen3")
    ids = chat.tokenizer.encode("<think>so</think><|im_start|>Lima")
    end = chat.tokenizer.eos_token_id
    assert chat.text(ids) == chat.text([*ids, end]) == "<think>so</think><|im_start|>Lima"
    assert chat.text([*ids, end, end]) == "<think>so</think><|im_start|>Lima<|im_end|>"
    assert chat.text([]) == ""


def test_template_variables_reach_the_prompt_and_every_reply():
    chat = renderer("qwen3", template_kwargs={"enable_thinking": False})
    closed = "<think>\n\n</think>\n\n"
    assert chat.tokenizer.decode(chat.prompt_ids([USER])).endswith(closed)
    assert chat.tokenizer.decode(chat.reply_ids([USER], 5)).endswith(closed)


def test_an_end_token_that_has_no_role_in_the_tokenizer_is_found():
    tokenizer = build_tokenizer("qwen3")
    tokenizer.eos_token = tokenizer.pad_token
    assert ChatRenderer(tokenizer).end_of_turn == "<|im_end|>"


def plain_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer("qwen3")
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "no chat template"),
        ("{% for m in messages %}{{ m.role if m.role == 'user' }}<|im_end|>{% endfor %}", "assistant messages"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "without a special token"),
        # the header of the next turn is no end of this one: what lies between would be lost
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}",
            "without a special token",
        ),
    ],
)
def test_a_template_that_cannot_hold_a_conversation_is_refused(template, says):
    with pytest.raises(TemplateError, match=says):
        ChatRenderer(plain_tokenizer(template))
