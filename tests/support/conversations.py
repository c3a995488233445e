"""Conversations by script, and renderers for the chat templates of TRL."""

import asyncio
import re
from functools import lru_cache

from tokenizers import AddedToken

from mt_grpo.envs import MultiTurnToolEnv, Step
from mt_grpo.rollout import ChatRenderer, RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.trajectory import StopReason, Turn
from support.models import TEMPLATES, build_tokenizer

SPECIAL = r"<[|｜][^<>\s]+?[|｜]>|</?[a-z_]+_of_(?:turn|utterance)>|<\|[a-z_]+>|<[a-z_]+\|>|</s>"


class Talk(MultiTurnToolEnv):
    """Answers every turn with the next user message of a list, until there is none."""

    def __init__(self, replies, **options):
        super().__init__(**{"protocol": "learnt_tags", **options})
        self.replies = replies

    async def step(self, turn):
        turn.error = None  # there is nothing to call
        return Step(done=StopReason.ANSWERED) if turn.index == len(self.replies) else self.replies[turn.index]


def read(env: MultiTurnToolEnv, text: str, index: int = 0) -> Turn:
    """A turn with this text, as the environment's protocol reads it."""
    parsed = env.protocol.parse(text, None)
    return Turn(index, parsed.message, parsed.calls, error=parsed.error, answer=parsed.answer)


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def converse(tokenizer, turns, replies, history, compact_every=None, prompt="Q1", end="<|im_end|>"):
    """Runs one scripted conversation: its trajectory, the runner, and (context, action) as the engine saw them."""
    engine = ScriptedEngine(tokenizer, lambda session, turn: turns[turn] + end)
    runner = RolloutRunner(Talk(replies), engine, history=history, compact_every=compact_every)
    (trajectory,) = asyncio.run(runner.run([RolloutRequest(prompt, "0")], SamplingParams()))
    assert trajectory.error is None, trajectory.error
    return trajectory, runner, [(context, sample.ids) for _, context, sample in engine.requests]


def play(source, script, rows=({},), *, prompt="Q1", tokenizer=None, keep=False, run=asyncio.run, **options):
    """
    Conversations of an environment, one for each row: their trajectories, and the runner. The model says what a
    function of session and turn returns, or else turns of all conversations or of each, without what ends a turn.
    `options` are limits, an `engine`'s class, and others of the runner.
    """

    def says(session, turn):
        if callable(script):
            return script(session, turn)
        return (script if isinstance(script[0], str) else script[int(session)])[turn] + "<|im_end|>"

    limits = {name: options.pop(name) for name in list(options) if name in RolloutLimits.__dataclass_fields__}
    engine = options.pop("engine", ScriptedEngine)(tokenizer or build_tokenizer(), says)
    runner = RolloutRunner(source, engine, RolloutLimits(**limits), **options)
    requests = [RolloutRequest(row.get("prompt", prompt), f"{at:03d}", dict(row)) for at, row in enumerate(rows)]
    return run(runner.run(requests, SamplingParams(), keep_environments=keep)), runner


@lru_cache
def template_tokenizer(name: str):
    """One with a template of TRL's, and its special tokens."""
    tokenizer = build_tokenizer(name)
    marks = set(re.findall(SPECIAL, tokenizer.chat_template))
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in sorted(marks)])
    tokenizer.bos_token = "<|endoftext|>"
    return tokenizer


@lru_cache
def renderer(name: str) -> ChatRenderer:
    """One with the special tokens of its template."""
    return ChatRenderer(template_tokenizer(name))


NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
