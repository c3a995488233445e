"""
Training on the conversations that a run logged, without an engine. Apart from the trainer, since it alone reads a
run's files, and holds them against the options.
"""

from __future__ import annotations

import logging
from itertools import groupby, takewhile
from math import ceil, isfinite, isnan
from numbers import Real
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import IntervalStrategy, PreTrainedTokenizerBase
from trl import GRPOTrainer

from mt_grpo.errors import ConfigError, UserError, refuse_first
from mt_grpo.imports import did_you_mean
from mt_grpo.rewards import RewardFunc, Scores, StateScore, TeacherAgreement, TeacherLogRatio
from mt_grpo.rollout import Engine, Sample, SamplingParams
from mt_grpo.runlog import Run, open_run
from mt_grpo.runlog.schema import session_number
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.rollout_batch import RolloutBatch
from mt_grpo.trajectory import Row, Trajectory

_NOTHING_SAMPLED = "`replay` trains on what a run logged, and samples nothing: leave it out, or evaluate nothing."

logger = logging.getLogger(__name__)


def _reads_as(teacher: dict[str, Any]) -> dict[str, Any]:
    """What decides the log-probs of a teacher."""
    return {name: value for name, value in teacher.items() if name not in ("server", "gate")}


class _NoEngine:
    """What stands in an engine's place where nothing is sampled."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context_length: int) -> None:
        self.tokenizer, self.context_length = tokenizer, context_length

    async def generate(self, context: list[int], sampling: SamplingParams, session: str) -> Sample:
        raise ConfigError(_NOTHING_SAMPLED)

    def release(self, session: str) -> None:
        pass

    async def close(self) -> None:
        pass


class Replay:
    """The generation batches of a run: the n-th that a trainer asks for is the n-th that the run sampled."""

    def __init__(self, args: MTGRPOConfig) -> None:
        assert args.replay is not None
        self.folder = Path(args.replay)
        if self.folder.resolve() == Path(args.output_dir).resolve():
            raise ConfigError(
                f"`output_dir: {args.output_dir}` is the run that is replayed: give another `--output_dir`."
            )
        try:
            self._run: Run = open_run(self.folder)
        except UserError as error:
            raise ConfigError(f"`replay: {args.replay}` cannot be replayed. {error}") from None
        self._batches = self._whole_batches()
        if not self._batches:
            raise ConfigError(
                f"`replay: {args.replay}` has no whole batch that was sampled to train on, and scored: name the "
                "folder of a run that has trained."
            )
        self._check_sizes(args)
        # prompts come in the order in which the run's conversations are read
        args.__dict__.update(
            do_eval=False, eval_strategy=IntervalStrategy.NO, load_best_model_at_end=False, shuffle_dataset=False
        )
        if args.process_index == 0:
            logger.warning(
                "Replays %s: nothing is sampled, scored or evaluated. The first step is the one that the run took; "
                "later ones train on what the run sampled then, not on what this model would.",
                self.folder,
            )

    def _whole_batches(self) -> list[list[Row]]:
        """Rows of the index of each batch, up to the first that a run which was ended has left unfinished."""
        sampled = [row for row in self._run.rows if row["mode"] == "train"]
        # as they were written: at the end of an epoch a step may be short, and in the next one `k` does not begin at 0
        order: dict[tuple[int, int], int] = {}
        for row in sampled:
            order.setdefault((row["step"], row["k"]), len(order))
        sampled.sort(key=lambda row: (row["step"], order[row["step"], row["k"]], row["session"]))
        batches = [list(rows) for _, rows in groupby(sampled, key=lambda row: (row["step"], row["k"]))]
        size, judged = max(map(len, batches), default=0), bool(self._run.about.get("rewards"))  # else taught alone

        def whole(rows: list[Row]) -> bool:
            return len(rows) == size and (not judged or all(row["rewards"] for row in rows))

        return list(takewhile(whole, batches))

    def _check_sizes(self, args: MTGRPOConfig) -> None:
        """Whether batches are as large as those of the run, and suffice for the steps that are asked for."""
        size, group, batches = len(self._batches[0]), self._run.about.get("group_size"), len(self._batches)
        per_batch = args.steps_per_generation * args.num_iterations  # micro-batches
        steps = batches * per_batch // args.gradient_accumulation_steps
        if args.max_steps <= 0:
            args.max_steps = steps
        needed = ceil(args.max_steps * args.gradient_accumulation_steps / per_batch)
        run = f"The run {self.folder}"
        refuse_first(
            (
                not group,
                f"{run} does not say how many conversations it has for each prompt: its index has no line of kind "
                "`run` that does. Bring its rollouts/index.jsonl back, or replay another run.",
            ),
            (
                group != args.num_generations,
                f"{run} has {group} conversations for each prompt, and `num_generations` is {args.num_generations}: "
                f"set `num_generations: {group}`.",
            ),
            (
                size != args.generation_batch_size,
                f"{run} sampled {size} conversations at a time, and these options take {args.generation_batch_size}: "
                "let `per_device_train_batch_size` × `steps_per_generation` × processes "
                f"({args.per_device_train_batch_size} × {args.steps_per_generation} × {args.world_size} here) be "
                f"{size}.",
            ),
            (
                steps == 0,
                f"{run} has {batches} whole batches, which do not suffice for one step with "
                f"`gradient_accumulation_steps: {args.gradient_accumulation_steps}`: set a smaller number.",
            ),
            (
                args.max_steps > steps,
                f"{run} has {batches} whole batches, and `max_steps: {args.max_steps}` takes {needed}: set "
                f"`max_steps` to {steps} at most.",
            ),
        )

    def check_rewards(self, rewards: list[RewardFunc | StateScore]) -> None:
        """Whether the run scored its conversations by all these rewards."""
        known = list(self._batches[0][0]["rewards"])
        for reward in rewards:
            if not isinstance(reward, StateScore) and reward.name not in known:
                near = did_you_mean(reward.name, known)
                raise ConfigError(
                    f"The run {self.folder} has no scores of the reward {reward.name!r}{near}: it has those of "
                    f"{', '.join(known)}, and a replay scores nothing."
                )

    def check_teacher(self, args: MTGRPOConfig, rewards: list[RewardFunc | StateScore]) -> None:
        """Whether the run has what a teacher is to see, and its scores by a teacher are by this one."""
        if not isinstance(args.teacher, dict):
            return
        if "answer" in args.teacher.get("sees", ()):
            (first,) = self._run.trajectories(self._batches[0][:1])
            if "answer" not in first["row"]:
                raise ConfigError(
                    "`teacher: {sees: [answer]}` takes the right answer from the column 'answer', which the rows of "
                    f"the run {self.folder} did not have: leave it out, or replay another run."
                )
        here = _reads_as(args.teacher)
        there = _reads_as((self._run.about.get("options") or {}).get("teacher") or {})
        for reward in rewards:
            if isinstance(reward, (TeacherAgreement, TeacherLogRatio)) and there != here:
                raise ConfigError(
                    f"The scores {reward.name!r} of the run {self.folder} are by another teacher (`{there}` there, "
                    f"`{here}` here), and a replay scores nothing: set that one in `teacher`, or leave them out."
                )

    def engine(self, tokenizer: PreTrainedTokenizerBase, context_length: int) -> Engine:
        """What stands in an engine's place; refuses a tokenizer whose tokens are others than the run's."""
        saved = self._run.tokenizer
        if saved is not None and saved.get_vocab() != tokenizer.get_vocab():
            raise ConfigError(
                f"The run {self.folder} has another tokenizer than {tokenizer.name_or_path!r}, so its token ids mean "
                "something else there: replay it with the model that it trained (`model_name_or_path`)."
            )
        return _NoEngine(tokenizer, context_length)

    def rows(self) -> Dataset:
        """A row for each prompt, in the order of the batches; what was asked is in the conversations themselves."""
        prompts = [
            [{"role": "user", "content": row["prompt"]}] for rows in self._batches for row in rows if not row["member"]
        ]
        return Dataset.from_dict({"prompt": prompts})

    def fill_in(self, batch: RolloutBatch, trainer: GRPOTrainer, first: int) -> None:
        """Gives a trainer's batch its trajectories and their scores; `first` is the number of its first row."""
        if batch.mode != "train":
            raise ConfigError(_NOTHING_SAMPLED)
        number = trainer._step // (trainer.args.steps_per_generation * trainer.num_iterations)
        vocabulary = trainer.model.config.get_text_config().vocab_size
        rows = self._batches[number][first : first + len(batch.rows)]
        try:
            records = list(self._run.trajectories(rows))
        except UserError as error:
            raise ConfigError(str(error)) from None
        trajectories = [
            Trajectory.from_dict({name: value for name, value in record.items() if name not in ("step", "mode")})
            for record in records
        ]
        for trajectory in trajectories:
            self._check(trajectory, batch, vocabulary)
        of_run = {
            "turn": trainer.turn_reward_funcs,
            "outcome": trainer.outcome_reward_funcs,
            "state": trainer.state_scores,
        }
        turns, outcomes, states = (
            [[self._scores(each, kind, reward.name) for each in trajectories] for reward in rewards]
            for kind, rewards in of_run.items()
        )
        names = {kind: [reward.name for reward in rewards] for kind, rewards in of_run.items()}
        for each in trajectories:  # without those that this run leaves out
            each.rewards = {
                kind: {name: score for name, score in scores.items() if name in names[kind]}
                for kind, scores in each.rewards.items()
            }
        batch.trajectories = trajectories  # what is damaged is not written again
        batch.scores = Scores(turns, outcomes, states)

    def _scores(self, trajectory: Trajectory, kind: str, name: str) -> Any:
        of_kind = trajectory.rewards.get(kind, {})
        if name not in of_kind:
            raise ConfigError(
                f"The conversation {trajectory.session} of the run {self.folder} has no score of the {kind} reward "
                f"{name!r}: leave the reward out, or replay a run that has it."
            )
        scores = of_kind[name]
        numbers = [scores] if kind == "outcome" else scores
        fits = kind == "outcome" or (isinstance(scores, list) and len(scores) == len(trajectory.turns))
        if not fits or not all(score is None or (isinstance(score, Real) and isfinite(score)) for score in numbers):
            raise ConfigError(
                f"The conversation {trajectory.session} of the run {self.folder} is damaged: its score of the {kind} "
                f"reward {name!r} is {scores!r:.80}. Bring its file back, or replay another run."
            )
        return scores

    def _check(self, trajectory: Trajectory, batch: RolloutBatch, vocabulary: int) -> None:
        nodes = trajectory.tree.nodes
        tokens = [token for node in nodes for token in node.tokens] or [0]
        branched = not trajectory.turns or trajectory.branch_of is not None
        branches = 1 if batch.branching is None else batch.branching.number
        conversation = f"The conversation {trajectory.session} of the run {self.folder}"
        refuse_first(
            (
                any(isnan(logprob) for node in nodes for logprob in node.logprobs),
                f"{conversation} lacks log-probs of sampled tokens, with which the loss compares the model's: replay "
                "a run whose engine gave them.",
            ),
            (
                min(tokens) < 0,
                f"{conversation} shows images or plays sounds, which a replay cannot look at: replay a run of text.",
            ),
            (
                max(tokens) >= vocabulary,
                f"{conversation} has the token {max(tokens)}, and the model knows {vocabulary}: replay it with the "
                "model that it trained (`model_name_or_path`).",
            ),
            (
                not branched and session_number(trajectory.session) % branches,
                f"{conversation} did not branch, and `branch_at` is set: leave it out, or set `num_branches` as the "
                "run had it.",
            ),
        )
