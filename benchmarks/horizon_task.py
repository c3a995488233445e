"""
The task, the model and the arms of `horizon.py`: conversations of K small tasks, each with a turn of its own.

Every question names four things, each after a word of its own, in an order drawn at random:

    of n12 by n40 at n3 in n27 find ?      right: search n12   (skill A: search for what stands after "of")
    at n9 in n51 of n12 by n2 count ?      right: tally n9     (skill B: another tool, and what stands after "at")

The model is warm-started on made-up conversations in which tool and name are drawn at random: it knows the form of
a call, how to copy a name and that some words matter more than others (`HABITS`), and neither skill. A turn samples
three tokens: tool, name, end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ablation_arms import shuffled
from datasets import Dataset
from jobs import PATIENCE, Job, run_all
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    PrinterCallback,
    ProgressCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)

from mt_grpo import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.credit import RewardBatch, Rule, advantage_estimator, reward_to_go
from mt_grpo.credit.rule import Scale
from mt_grpo.envs.env import Step, StepEnv
from mt_grpo.envs.protocols import ParsedTurn
from mt_grpo.rewards import AnswerLogprob, OutcomeReward, TurnReward
from mt_grpo.trajectory import ToolCall, Trajectory, Turn

MARKERS = ("of", "by", "at", "in")
TOOLS = ("search", "tally")
NAMES = tuple(f"n{index}" for index in range(32))
RESULTS = tuple(f"r{index}" for index in range(16))
HABITS = {"of": 0.4, "at": 0.4, "by": 0.1, "in": 0.1}
"""How often the warm start's conversations call with the name after a word, whatever is asked."""
SEARCHES = {"find": 0.7, "count": 0.6}
"""How often they call `search`, the first tool, by what is asked."""


@dataclass(frozen=True)
class Skill:
    """What a question asks for: the word it begins with, and the tool and the marker of the right call."""

    asks: str
    tool: str
    marker: str


SKILLS = (Skill("find", "search", "of"), Skill("count", "tally", "at"))

TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} {{ message['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


@dataclass(frozen=True)
class Setting:
    """
    What is trained.

    Args:
        turns (`int`): Tasks of a conversation, K.
        skills (`int`): 1, or 2: then the second half of a conversation asks for skill B; with one turn every second
            conversation does.
        needed (`float`): Share of the tasks that must be right for the outcome 1.
        judge (`str`): What turn rewards say: `"right"` (1 / K for a right call), `"noisy"` (the same, but wrong about
            20 % of the calls) or `"misleading"` (1 / K for every search, whatever it finds).
    """

    turns: int
    skills: int
    needed: float = 1.0
    judge: str = "right"


SETTINGS: dict[str, Setting] = {
    **{f"{name}-{turns}": Setting(turns, skills) for skills, name in ((1, "one"), (2, "two")) for turns in (1, 4, 12)},
    "two-12-most": Setting(12, 2, needed=0.75),
    "one-12-noisy": Setting(12, 1, judge="noisy"),
    "two-12-noisy": Setting(12, 2, judge="noisy"),
    "one-12-misleading": Setting(12, 1, judge="misleading"),
    "two-12-misleading": Setting(12, 2, judge="misleading"),
}

ARMS: dict[str, Rule] = {
    "grpo_or": "grpo_or",
    "grpo_mr": "grpo_mr",
    "mt_grpo": "mt_grpo",
    "reward_to_go": "reward_to_go",
    "gtpo": {"name": "gtpo", "gamma": 0.5},
    "turn_gae": "turn_gae",
    "lambda_to_go": "lambda_to_go",
    "one_scale": {"name": "lambda_to_go", "lam": 0.8, "scales": "batch"},
    "shuffled": "reward_to_go_over_turns",
    "answer_baseline": "state_baseline",
}
"""The credit rule of each arm."""

GROUP = 8
"""Conversations of a group."""

SCORES = {"answer_baseline": "horizon_task.NextCall"}
"""The state score of an arm that has one."""


@advantage_estimator("reward_to_go_over_turns")
def reward_to_go_over_turns(batch: RewardBatch, *, turn_coef: float = 1.0, scale_rewards: Scale = "group") -> Tensor:
    """`reward_to_go` on turn rewards that are shuffled among the turns of their trajectory; (B, K)."""
    return reward_to_go(shuffled(batch, 0), turn_coef=turn_coef, scale_rewards=scale_rewards)


def question(rng: random.Random, skill: Skill) -> tuple[str, str]:
    """A question and the call that is right."""
    names = dict(zip(rng.sample(MARKERS, len(MARKERS)), rng.sample(NAMES, len(MARKERS)), strict=True))
    text = " ".join(f"{marker} {name}" for marker, name in names.items())
    return f"{text} {skill.asks} ?", f"{skill.tool} {names[skill.marker]}"


def rows(setting: Setting, number: int, seed: int) -> Dataset:
    """Conversations: the questions of each, the right calls, and where a noisy judge errs."""
    rng = random.Random(f"{setting.turns} {setting.skills} {seed}")
    made = []
    for index in range(number):
        late = (
            [index % 2 == 1] if setting.turns == 1 else [turn >= setting.turns // 2 for turn in range(setting.turns)]
        )
        asked = [question(rng, SKILLS[setting.skills == 2 and second]) for second in late]
        made.append(
            {
                "prompt": [{"role": "user", "content": asked[0][0]}],
                "questions": [text for text, _ in asked],
                "right": [call for _, call in asked],
            }
        )
    return Dataset.from_list(made)


class Calls:
    """The call protocol of the task: a turn is a tool and a name."""

    stop: tuple[str, ...] = ()
    native_tools = False
    tags: tuple[str, ...] = ()

    def instructions(self, tools: Sequence[Any]) -> None:
        return None

    def parse(self, text: str, tokenizer: Any, context: Sequence[int] = ()) -> ParsedTurn:
        message = {"role": "assistant", "content": text}
        words = text.split()
        if len(words) != 2 or words[0] not in TOOLS:
            return ParsedTurn(message, error="Call a tool with a name.")
        return ParsedTurn(message, [ToolCall(words[0], {"name": words[1]})])

    def replies(self, turn: Turn) -> list[dict[str, Any]]:
        return []


class Tasks(StepEnv):
    """K questions, one after another; each turn is answered with a result and the next question."""

    setting: Setting
    protocol = Calls()
    step_timeout = None

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._right: list[bool] = []
        # drawn anew for each conversation, and the same whenever it is repeated
        self._judge = random.Random(self.session)
        return list(row["prompt"])

    async def step(self, turn: Turn) -> Step:
        number = len(self._right)
        called = " ".join([turn.tool_calls[0].name, turn.tool_calls[0].arguments["name"]]) if turn.tool_calls else ""
        self._right.append(called == self.row["right"][number])
        for call in turn.tool_calls:
            call.executed, call.result = True, RESULTS[hash_of(called) % len(RESULTS)]
        result = turn.tool_calls[0].result if turn.tool_calls else "nothing"
        reward = self._pays(called) / self.setting.turns
        if number + 1 < self.setting.turns:
            return Step(f"{result} . {self.row['questions'][number + 1]}", reward=reward)
        share = sum(self._right) / len(self._right)
        return Step(
            reward=reward,
            done=True,
            rewards={"enough": float(share >= self.setting.needed)},
            info={"right": self._right},
        )

    def _pays(self, called: str) -> bool:
        if self.setting.judge == "misleading":
            return called.startswith("search ")
        errs = self.setting.judge == "noisy" and self._judge.random() < 0.2
        return self._right[-1] != errs


def hash_of(text: str) -> int:
    """The same number on every machine."""
    return sum((index + 1) * ord(letter) for index, letter in enumerate(text))


class ShareRight(OutcomeReward):
    """The share of tasks that were right: measured, and worth nothing."""

    weight = 0.0

    def score(self, trajectory: Trajectory, **row: Any) -> float | None:
        right = trajectory.info.get("right")
        return None if right is None else sum(right) / len(right)


class NextCall(AnswerLogprob):
    """How likely the policy finds the right call for the question that it has to answer next."""

    def __init__(self) -> None:
        super().__init__(column="right", prefix="")

    def answer_at(self, turn: int, row: Mapping[str, Any]) -> str:
        return row["right"][turn]


def environment(setting: Setting) -> Tasks:
    """The environment that conversations of a setting are copies of."""
    env = Tasks()
    env.setting = setting
    return env


def build_trainer(
    model: Path,
    folder: str,
    env: StepEnv,
    turn_rewards: Sequence[str | TurnReward],
    outcome_rewards: Sequence[str | OutcomeReward],
    *,
    turns: int,
    skills: int,
    groups: int,
    steps: int,
    seed: int,
    callbacks: Sequence[TrainerCallback] = (),
    **options: Any,
) -> MTGRPOEnvTrainer:
    """
    The trainer of a run, whatever is compared.

    Args:
        model (`Path`): The warm-started model.
        folder (`str`): Where the run leaves its files.
        env (`StepEnv`): What conversations are copies of.
        turn_rewards, outcome_rewards (`Sequence`): The rewards.
        turns, skills (`int`): Of a conversation's questions, as in `Setting`.
        groups (`int`): Groups of a step.
        steps, seed (`int`): How long it trains, and what is drawn.
        callbacks (`Sequence[TrainerCallback]`, *optional*): Callbacks of the trainer.
        **options: Options of `MTGRPOConfig` that runs differ in.
    """
    args = MTGRPOConfig(
        folder,
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=groups * GROUP,
        num_generations=GROUP,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
        max_grad_norm=0.5,
        beta=0.0,
        max_turn_length=4,
        max_completion_length=24 * turns,
        tokenization_sanity_check_mode="disable",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    trainer = MTGRPOEnvTrainer(
        AutoModelForCausalLM.from_pretrained(model),
        env,
        turn_reward_funcs=list(turn_rewards),
        outcome_reward_funcs=list(outcome_rewards),
        args=args,
        train_dataset=rows(Setting(turns, skills), steps * groups, seed),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=list(callbacks),
    )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.runner.engine.patience = PATIENCE
    trainer.runner.engine.max_batch_size = groups * GROUP
    return trainer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = [*special, "?", ".", "nothing", "user", "assistant", "system", *MARKERS, *TOOLS]
    words += [*(skill.asks for skill in SKILLS), *NAMES, *RESULTS]
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


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0, positions: int = 512) -> Qwen3ForCausalLM:
    """A Qwen3 of two layers, with random weights."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            max_position_embeddings=positions,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            initializer_range=0.1,  # with less, copying takes long to begin
        )
    )


LENGTHS = {12: (1, 4, 12, 12), 32: (1, 4, 12, 32)}
"""Turns of the conversations of a warm start, by those of the longest ones."""


def warm_start(folder: Path, steps: int = 2500, longest: int = 12) -> None:
    """Trains the model on conversations with random calls and saves it; about a minute of one core."""
    torch.set_num_threads(1)  # several wait for each other: on busy cores five times the work
    tokenizer = build_tokenizer()
    tokenizer.model_max_length = positions = 512 if longest == 12 else 1024
    model = build_model(tokenizer, positions=positions)
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 50) * (1 - step / steps))
    for step in range(steps):
        turns = 1 if step < 400 else rng.choice(LENGTHS[longest])
        ids, mask = _traces(rng, tokenizer, {1: 128, 4: 32, 12: 16, 32: 8}[turns], turns)
        logits = model(ids[:, :-1]).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        wanted = mask[:, 1:].flatten()
        loss = (losses * wanted).sum() / wanted.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def model_of(folder: Path, turns: int) -> Path:
    """Where the warm-started model for conversations of so many turns is."""
    return folder / ("model" if turns <= 12 else "model_32")


def run_missing(
    work: Callable[..., Job], given: Sequence[Job], *options: Any, folder: Path, workers: int, turns: int = 12
) -> None:
    """Runs the jobs that have left no file, given `options`; the model is made first where it is not there."""
    left = [job for job in given if not job.file(folder).exists()]
    if not left:
        return
    model = model_of(folder, turns)
    if not (model / "config.json").exists():
        print("warm-starting the model, in a minute or two", flush=True)
        warm_start(model, longest=12 if turns <= 12 else 32)
    run_all(work, left, *options, folder=folder, workers=workers)


def _traces(rng: random.Random, tokenizer: PreTrainedTokenizerFast, size: int, turns: int) -> tuple[Tensor, Tensor]:
    """Conversations with random calls, as ids and a mask of the model's tokens; all are of one length."""
    rows_, masks = [], []
    for _ in range(size):
        ids: list[int] = []
        mask: list[float] = []
        for turn in range(turns):
            skill = rng.choice(SKILLS)
            text, _ = question(rng, skill)
            marker = rng.choices(list(HABITS), list(HABITS.values()))[0]
            name = text.split()[text.split().index(marker) + 1]
            before = "" if turn == 0 else f"{rng.choice(RESULTS)} . "
            tool = TOOLS[rng.random() >= SEARCHES[skill.asks]]
            for piece, learn in (
                (f"<|im_start|> user {before}{text} <|im_end|> <|im_start|> assistant", 0.0),
                (f"{tool} {name} <|im_end|>", 1.0),
            ):
                encoded = tokenizer.encode(piece)
                ids += encoded
                mask += [learn] * len(encoded)
        rows_.append(ids)
        masks.append(mask)
    return torch.tensor(rows_), torch.tensor(masks)
