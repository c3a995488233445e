"""
The task, the model, the probe and its oracle of `success_probe.py`: twelve decisions of which two are heavy, and an
outcome alone pays; see reports/success_probe.md.

Questions are those of `horizon.py` (skill A): search for the name after "of". One that ends with "!" instead of "?" is
heavy. The environment answers "r1" where a call was right and "r0" where it was not, as a search shows what it found.

The model is warm-started to call with names at random, and apart from that to say whether an attempt will succeed. It
learns that from attempts of any skill, after any turn, and not from its own: as one that has read how others fared.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from horizon_task import (
    HABITS,
    MARKERS,
    NAMES,
    RESULTS,
    SEARCHES,
    SKILLS,
    TEMPLATE,
    TOOLS,
    Calls,
    Setting,
    build_model,
    question,
)
from horizon_task import rows as plain_rows
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mt_grpo.credit import RewardBatch, advantage_estimator, estimate
from mt_grpo.credit.rule import Scale
from mt_grpo.envs.env import Step, StepEnv
from mt_grpo.errors import ConfigError
from mt_grpo.rewards import OutcomeReward, StateScore
from mt_grpo.rewards.builtin import RightAnswer
from mt_grpo.trajectory import Trajectory, Turn

TURNS, HEAVY = 12, (2, 7)
"""Turns of a conversation, and those of heavy decisions; the first is 0."""
WEIGHTS = tuple(0.3 if turn in HEAVY else 0.04 for turn in range(TURNS))
STEEP = 12.0
FIND = SKILLS[0]
RIGHT, WRONG = "r1", "r0"
QUESTION, YES, NO = "succeed ?", "yes", "no"


# What is paid


def chance(weight_right: float) -> float:
    """The chance of the outcome 1, by the weights of the right calls, which sum to 1 where all are right."""
    return 1 / (1 + math.exp(-STEEP * (weight_right - 0.5)))


def weight_of(right: list[bool]) -> float:
    return sum(weight for weight, each in zip(WEIGHTS, right, strict=False) if each)


def rows(number: int, seed: int) -> Dataset:
    """Conversations: the questions of each and the right calls."""

    def mark(row: dict[str, Any]) -> dict[str, Any]:
        asked = row["questions"]
        return {"questions": [marked(text, turn) for turn, text in enumerate(asked)]}

    return plain_rows(Setting(TURNS, 1), number, seed).map(mark)


def marked(text: str, turn: int) -> str:
    """A question as it is asked at a turn."""
    return f"{text.removesuffix(' ?')} {'!' if turn in HEAVY else '?'}"


class Attempt(StepEnv):
    """Twelve questions, one after another; each call is answered with whether it was right, and the next question."""

    protocol = Calls()
    step_timeout = None

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._right: list[bool] = []
        self._luck = random.Random(self.session).random()  # the same whenever the conversation is repeated
        return list(row["prompt"])

    async def step(self, turn: Turn) -> Step:
        number = len(self._right)
        called = " ".join([turn.tool_calls[0].name, turn.tool_calls[0].arguments["name"]]) if turn.tool_calls else ""
        self._right.append(called == self.row["right"][number])
        result = RIGHT if self._right[-1] else WRONG
        for call in turn.tool_calls:
            call.executed, call.result = True, result
        if number + 1 < TURNS:
            return Step(f"{result} . {self.row['questions'][number + 1]}")
        return Step(done=True, info={"right": self._right, "luck": self._luck})


class Succeeded(OutcomeReward):
    """1 with the chance that the weighted sum of right calls gives, else 0; also 0 for an attempt that broke off."""

    def score(self, trajectory: Trajectory, **row: Any) -> float | None:
        info = trajectory.info
        return float("right" in info and info["luck"] < chance(weight_of(info["right"])))


class Chance(OutcomeReward):
    """That chance: measured, and worth nothing."""

    weight = 0.0

    def score(self, trajectory: Trajectory, **row: Any) -> float | None:
        return chance(weight_of(trajectory.info["right"])) if "right" in trajectory.info else 0.0


# Scores of the state


class Answer(RightAnswer):
    """One answer to a question that is asked behind every context, the same for all rows."""

    def __init__(self, question: str = QUESTION, answer: str = "") -> None:
        super().__init__(column="prompt", prefix=f"{question} ")
        self.answer = answer

    def right_answer(self, value: Any) -> str:
        return self.answer

    def answer_at(self, turn: int, row: Mapping[str, Any]) -> str:
        return self.answer


class SuccessProbe(Answer, StateScore):
    """
    Whether the policy itself says that this attempt will succeed, in the context of the next turn: log p(yes) −
    log p(no), per token, in nats. `None` after the last turn, which no turn follows.

    A trainer scores one answer for each reward, so `no` is asked for by `Denial`. Both go to the trainer (`both`): of
    several state scores the last one counts.

    Args:
        question (`str`, *optional*, defaults to `"succeed ?"`): What is asked behind the context.
        yes, no (`str`, *optional*, default to `"yes"` and `"no"`): The answers.
    """

    name = "success_probe"

    def __init__(self, question: str = QUESTION, yes: str = YES, no: str = NO) -> None:
        super().__init__(question, yes)
        self.denial = Denial(question, no)

    @property
    def both(self) -> list[StateScore]:
        return [self.denial, self]

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """
        Whether a tokenizer tells the answers apart.

        Raises:
            ConfigError: If it does not.
        """
        yes, no = (
            tokenizer.encode(self.prefix + each.answer, add_special_tokens=False) for each in (self, self.denial)
        )
        if yes == no:
            raise ConfigError(
                f"The state score {self.name!r} has the answers {self.answer!r} and {self.denial.answer!r}, which are "
                "the same tokens to this tokenizer: give it two that differ with `yes` and `no`."
            )

    def score(self, turn: Turn, trajectory: Trajectory, **row: Any) -> float | None:
        states = zip(self.logprobs(trajectory), self.denial.logprobs(trajectory), strict=True)
        yes, no = next(iter(list(states)[turn.index + 1 : turn.index + 2]), (None, None))
        return None if yes is None or no is None else yes - no


class Denial(Answer, StateScore):
    """The log-prob of the other answer, for `SuccessProbe`; no score of its own."""

    name = "success_denial"

    def score(self, turn: Turn, trajectory: Trajectory, **row: Any) -> float | None:
        return None


class Value(RightAnswer, StateScore):
    """
    The chance that the attempt succeeds, by the calls that were right so far and by how likely the policy makes the
    next right call. Those after it are taken to be as likely as the calls up to there were in the mean.
    """

    name = "value"

    def __init__(self) -> None:
        super().__init__(column="right", prefix="")

    def answer_at(self, turn: int, row: Mapping[str, Any]) -> str:
        return row["right"][turn]

    def score(self, turn: Turn, trajectory: Trajectory, **row: Any) -> float | None:
        begins = turn.index + 1
        known = self.logprobs(trajectory)[: begins + 1]
        if begins == TURNS or None in known:
            return None
        likely = [math.exp(2 * each) for each in known if each is not None]  # a call is two tokens
        right = [any(call.result == RIGHT for call in each.tool_calls) for each in trajectory.turns[:begins]]
        return value(weight_of(right), begins, likely[-1], sum(likely) / len(likely))


def value(so_far: float, turn: int, likely: float, later: float) -> float:
    """The chance of the outcome 1 where `turn` begins: the next call is right so often, and those after it."""
    right, wrong = (_ahead(round(so_far + won, 6), turn + 1, later) for won in (WEIGHTS[turn], 0.0))
    return likely * right + (1 - likely) * wrong


@lru_cache(maxsize=65536)
def _counts(number: int, likely: float) -> list[float]:
    return [math.comb(number, won) * likely**won * (1 - likely) ** (number - won) for won in range(number + 1)]


def _ahead(so_far: float, turn: int, likely: float) -> float:
    heavy = sum(each >= turn for each in HEAVY)
    return sum(
        much * often * chance(so_far + 0.3 * wins + 0.04 * others)
        for wins, much in enumerate(_counts(heavy, likely))
        for others, often in enumerate(_counts(TURNS - turn - heavy, likely))
    )


# The rule


@advantage_estimator("state_baseline_where_it_explains")
def state_baseline_where_it_explains(batch: RewardBatch, *, scale_rewards: Scale = "group") -> Tensor:
    """
    `state_baseline` with `lam` 1 for the groups in which scores explain anything of what is left, judged on the other
    groups; `grpo_or` × G / (G − 1) for the rest; (B, K).
    """
    with_scores, without = advantages(batch, scale_rewards)
    return torch.where(used(batch, scale_rewards).repeat_interleave(batch.group_size)[:, None], with_scores, without)


def used(batch: RewardBatch, scale_rewards: Scale = "group") -> Tensor:
    """
    Of each group whether scores explain anything among the *other* groups, each of them fitted on those that are
    neither; shape (B / G,), bool. So what is sampled in a group does not decide on its own baseline.
    """
    groups = torch.arange(len(batch.turn_mask)) // batch.group_size
    return torch.tensor(
        [explained(of_rows(batch, groups != group), scale_rewards) > 0 for group in range(int(groups[-1]) + 1)]
    )


def explained(batch: RewardBatch, scale_rewards: Scale = "group") -> float:
    """The share of squared advantages after the first turn that scores take away, each group fitted on the others."""
    with_scores, without = (each[:, 1:].double().square().sum() for each in advantages(batch, scale_rewards))
    return float(1 - with_scores / without) if without > 0 else 0.0


def advantages(batch: RewardBatch, scale_rewards: Scale) -> tuple[Tensor, Tensor]:
    """Those of `state_baseline` with its scores and without, (B, K)."""
    scores = batch.needed("state_baseline", "state_scores")
    blind = replace(batch, state_scores=torch.full_like(scores, torch.nan))
    with_scores, without = (estimate("state_baseline", each, scale_rewards=scale_rewards) for each in (batch, blind))
    return with_scores, without


def of_rows(batch: RewardBatch, kept: Tensor) -> RewardBatch:
    """A part of a batch, as far as `state_baseline` reads it."""
    return RewardBatch(
        batch.turn_rewards[kept],
        batch.outcome_rewards[kept],
        batch.turn_mask[kept],
        batch.result_mask[kept],
        batch.group_size,
        state_scores=batch.needed("state_baseline", "state_scores")[kept],
    )


# The model


def build_tokenizer() -> PreTrainedTokenizerFast:
    """That of `horizon.py`, with the words of the probe."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = [*special, "?", "!", ".", "nothing", "user", "assistant", "system", *MARKERS, *TOOLS]
    words += [FIND.asks, "succeed", YES, NO, *NAMES, *RESULTS]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="nothing"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def warm_start(folder: Path, steps: int = 2500, statements_from: int = 600) -> dict[str, float]:
    """Trains the model and saves it, in minutes of one core; returns the last losses."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 50) * (1 - step / steps))
    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in (YES, NO))
    losses: dict[str, float] = {}
    for step in range(steps):
        turns = 1 if step < 400 else rng.choice((1, 4, 12))
        made = [_calls(rng, turns, own=True) for _ in range({1: 128, 4: 32, 12: 12}[turns])]
        ids = torch.tensor([tokenizer.encode(text) for text, _ in made])
        logps = model(ids[:, :-1]).logits.log_softmax(dim=-1)
        follows = torch.tensor(tokenizer.encode("assistant"))
        begins = (ids[:, :-3] == follows).nonzero()
        places = torch.cat([begins + torch.tensor([0, more]) for more in (1, 2, 3)])
        loss = -logps[places[:, 0], places[:, 1] - 1, ids[places[:, 0], places[:, 1]]].mean()
        losses["calls"] = loss.item()
        if step >= statements_from:
            cut = rng.randrange(1, TURNS)
            said = [_calls(rng, cut, own=False) for _ in range(24)]
            ids = torch.tensor([tokenizer.encode(f"{text} {QUESTION}") for text, _ in said])
            target = torch.tensor([likely for _, likely in said])
            logps = model(ids, logits_to_keep=1).logits[:, -1].log_softmax(dim=-1)
            statement = -(target * logps[:, yes] + (1 - target) * logps[:, no]).mean()
            losses["statements"] = statement.item()
            loss = loss + statement
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return losses


def _calls(rng: random.Random, turns: int, own: bool) -> tuple[str, float]:
    """
    An attempt of so many turns, and its chance once it has gone on to its end. The model's own attempts end with a
    call; those of others, of any skill, with the next question.
    """
    skill = None if own else rng.random()
    text, right, result = "", [], ""
    for turn in range(TURNS):
        asked, wanted = question(rng, FIND)
        made = _call(rng, asked, wanted, skill)
        right.append(made == wanted)
        if turn < turns or (turn == turns and not own):
            text += f"<|im_start|> user {result}{marked(asked, turn)} <|im_end|> <|im_start|> assistant "
        if turn < turns:
            text += f"{made} <|im_end|> "
            result = f"{RIGHT if right[-1] else WRONG} . "
    return text.strip(), chance(weight_of(right))


def _call(rng: random.Random, asked: str, wanted: str, skill: float | None) -> str:
    if skill is not None and rng.random() < skill:
        return wanted
    marker = rng.choices(list(HABITS), list(HABITS.values()))[0]
    words = asked.split()
    return f"{TOOLS[rng.random() >= SEARCHES[FIND.asks]]} {words[words.index(marker) + 1]}"
