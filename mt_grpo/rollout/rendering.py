"""Turns messages into token ids: the prompt once, then each reply. Sampled ids are never encoded again."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from mt_grpo.errors import UserError
from mt_grpo.rollout.marks import Marks
from mt_grpo.rollout.suffix_cache import SuffixCache
from mt_grpo.trajectory import Message

# An assistant turn to hang a reply on; only what the template writes after it is used.
_ASSISTANT = "An assistant turn."
_CALLED = "a_tool_it_calls"
_PROMPTS_KEPT = 64
_CHARACTERS = 8
"""Characters per token of room above which a reply counts as too long; ordinary text has three or four per token."""


class TemplateError(UserError, ValueError):
    """The tokenizer's chat template cannot render the conversation. The message is one sentence fit for the user."""


class ChatRenderer:
    """
    Renders one model's conversations. Contents are always text: only the template writes marks, the tokens that
    structure a conversation. *Shielded* text tells the two apart; see `Marks`.

    Args:
        tokenizer: Tokenizer with a chat template.
        tools (`list[dict]`, *optional*): Tool schemas for the template to show.
        template_kwargs (`dict`, *optional*): Further variables of the template, e.g. `enable_thinking`.
        tags (`tuple[str, ...]`, *optional*): Added tokens that contents may hold, such as a call protocol's own.

    Attributes:
        end_of_turn (`str`), end_id (`int`): The token with which the template ends an assistant's turn.
        special_ids (`set[int]`): The tokenizer's special tokens.

    Raises:
        TemplateError: If the tokenizer has no chat template, or one that cannot hold a conversation.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        tags: tuple[str, ...] = (),
    ) -> None:
        if tokenizer.chat_template is None:
            raise TemplateError("The tokenizer has no chat template: use a chat model, or set `chat_template_path`.")
        self.tokenizer = tokenizer
        self.tools = tools
        self.template_kwargs = template_kwargs or {}
        self.marks = Marks(tokenizer, tokenizer.get_chat_template(), tags)
        self._shielded_tools = self.marks.shield_all(tools)
        added = tokenizer.added_tokens_decoder
        self.special_ids = {token for token, content in added.items() if content.special}
        self.end_id = self._find_end_of_turn()
        self.end_of_turn = tokenizer.convert_ids_to_tokens(self.end_id)
        self._prompt_ids = lru_cache(_PROMPTS_KEPT)(self.encode)
        self._suffixes = SuffixCache(tokenizer.get_chat_template(), self._shielded_reply_text)

    def prompt_ids(self, messages: list[Message], room: int | None = None) -> list[int] | None:
        """
        Ids of a conversation up to the assistant's first token. A group shares the list, so do not change it.

        Args:
            messages (`list[dict]`): The conversation.
            room (`int`, *optional*): Most tokens that the ids may have. If the messages are far too long, only their
                beginning is encoded, and `None` is returned.
        """
        if room is not None and self._exceed(messages, room, lambda cut: self.encode(self.prompt_text(cut))):
            return None
        return self._prompt_ids(self.prompt_text(messages))

    def prompt_text(self, messages: list[Message]) -> str:
        """The same as shielded text."""
        return self.shown_text(self.shielded(messages))

    def shielded(self, messages: list[Message]) -> list[Message]:
        """Messages with shielded contents, for the template."""
        return [self.marks.shield(message) for message in messages]

    def shown_text(self, messages: list[Message], header: bool = True) -> str:
        """Renders shielded messages to shielded text. Without `header` the conversation is finished."""
        return self.marks.tidy(self._render(messages, tools=self._shielded_tools, header=header))

    def reply_ids(self, replies: list[Message], last_id: int, room: int | None = None) -> list[int] | None:
        """
        Ids that follow a sampled turn: the end of the turn, the environment's messages, the assistant's header.

        Args:
            replies (`list[dict]`): The environment's messages.
            last_id (`int`): Last id that the model sampled. If it is the end-of-turn token, it is not added again.
            room (`int`, *optional*): Most tokens that the ids may have. If the replies are far too long, only their
                beginning is encoded, and `None` is returned.
        """
        if room is not None and self._exceed(replies, room, self._reply_ids):
            return None
        ids = self._reply_ids(replies)
        return ids[1:] if ids[0] == last_id else ids

    def _reply_ids(self, replies: list[Message]) -> list[int]:
        return self.encode(self.marks.tidy(self._suffixes.text(self.shielded(replies))))

    def _exceed(self, messages: list[Message], room: int, encode: Callable[[list[Message]], list[int]]) -> bool:
        """Whether messages have more than twice `room` tokens; encodes no more of them than is needed to know."""
        longest = max(len(message.get("content") or "") for message in messages)
        size = _CHARACTERS * (room + 100) // len(messages)
        while size < longest:
            # a cut changes tokens beside it only; and what the template does with contents it does with these too
            cut = [{**message, "content": (message.get("content") or "")[:size]} for message in messages]
            if len(encode(cut)) > 2 * room:
                return True
            size *= 2
        return False

    def _reply_text(self, replies: list[Message]) -> str:
        return self.marks.tidy(self._shielded_reply_text(self.shielded(replies)))

    def _shielded_reply_text(self, replies: list[Message]) -> str:
        assistant: Message = {"role": "assistant", "content": _ASSISTANT}
        by_tool = replies[0]["role"] == "tool"
        if by_tool:
            assistant["tool_calls"] = [{"type": "function", "function": {"name": _CALLED, "arguments": {}}}]
        text = self._render([{"role": "user", "content": "."}, assistant, *replies])
        words = text.find(_ASSISTANT)
        if by_tool:  # some templates write a call without its text
            words = max(words, text.find(_CALLED))
        return text[text.index(self.end_of_turn, words) :]

    def text(self, ids: list[int]) -> str:
        """The text that the model wrote, with special tokens except the one that ended the turn."""
        if ids and ids[-1] in (self.tokenizer.eos_token_id, self.end_id):
            ids = ids[:-1]
        return self.decode(ids)

    def _render(self, messages: list[Message], tools: list[dict[str, Any]] | None = None, header: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=header, tokenize=False, **self.template_kwargs
        )

    def encode(self, text: str) -> list[int]:
        """Ids of shielded text."""
        return self.marks.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Text of ids, with special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _find_end_of_turn(self) -> int:
        """The special token the template writes after an assistant's words."""
        messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": _ASSISTANT}]
        text = self._render(messages, header=False)  # the header of the next turn is not the end of this one
        if _ASSISTANT not in text:
            raise TemplateError("The chat template does not show assistant messages, so it holds no conversation.")
        rest = self.encode(text[text.index(_ASSISTANT) + len(_ASSISTANT) :])
        end_id = next((token for token in rest if token in self.special_ids), None)
        if end_id is None:
            raise TemplateError(
                "The chat template ends assistant turns without a special token, which is unsupported."
            )
        return end_id
