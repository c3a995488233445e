"""
What a teacher is shown before each turn that the policy did not see (`teacher: {sees: ...}`): the right answer, what a
successful member of the group wrote, or what the environment said of the attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from accelerate import PartialState
from accelerate.utils import gather_object
from trl import GRPOTrainer

from mt_grpo.errors import ConfigError
from mt_grpo.media import part_text
from mt_grpo.rewards import RewardFunc, TeacherAgreement, TeacherLogRatio
from mt_grpo.rewards.builtin import first_answer
from mt_grpo.rollout.token_row import AnswerLeaves
from mt_grpo.training.columns import Rows
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.ranks import everywhere
from mt_grpo.training.rollout_batch import RolloutBatch
from mt_grpo.trajectory import Trajectory

ANSWER = "answer"
"""The column with the right answer."""

FEEDBACK = ("feedback", "verifier_log")
"""Where an environment puts its word on a conversation, in `Outcome.info`; the second is that of a task's tests."""

SUCCESS = 1.0
"""What the first outcome reward gives a conversation that others may learn from: TRL's `success_reward_threshold`."""

logger = logging.getLogger(__name__)


def check_hints(
    args: MTGRPOConfig,
    rewards: Sequence[RewardFunc],
    outcomes: Sequence[RewardFunc],
    train_dataset: Rows | None,
    eval_dataset: Rows | dict[str, Rows] | None,
) -> None:
    """Refuses a teacher that is to see what no conversation of the run can have."""
    sees = _sees(args)
    if "sibling" in sees and not outcomes:
        raise ConfigError(
            "`teacher: {sees: [sibling]}` takes what a member of the group wrote that succeeded, and no outcome "
            "reward says which did: name one in `outcome_reward_funcs`, with weight 0 if it is not to be learnt from."
        )
    for reward in rewards:
        if "sibling" in sees and isinstance(reward, (TeacherAgreement, TeacherLogRatio)):
            raise ConfigError(
                f"The reward {reward.name!r} is scored together with the outcomes, and a teacher that sees `sibling` "
                "reads after them: leave one of the two out."
            )
        if "feedback" in sees and isinstance(reward, TeacherLogRatio):
            raise ConfigError(
                f"The score {reward.name!r} is a baseline, which must not know what comes, and a teacher that sees "
                "`feedback` knows how a conversation ended: leave one of the two out."
            )
    evaluated = eval_dataset if isinstance(eval_dataset, dict) else {"evaluation": eval_dataset}
    for name, rows in {"training": train_dataset, **evaluated}.items() if "answer" in sees else ():
        columns = (rows.column_names or []) if rows is not None else []
        if columns and ANSWER not in columns:
            raise ConfigError(
                f"`teacher: {{sees: [answer]}}` takes the right answer from the column {ANSWER!r}, which the {name} "
                f"dataset does not have: its columns are {', '.join(columns)}; name the right one with "
                f"`column_mapping: {{{ANSWER}: its name}}`."
            )


def _sees(args: MTGRPOConfig) -> list[str]:
    return args.teacher.get("sees", []) if isinstance(args.teacher, dict) else []


def needs_outcomes(args: MTGRPOConfig) -> bool:
    """Whether conversations are scored before the teacher reads them."""
    return "sibling" in _sees(args)


class Hints:
    """The hints of a run."""

    def __init__(self, args: MTGRPOConfig) -> None:
        self._sees = _sees(args)
        self._said = False

    def give(self, trainer: GRPOTrainer, batch: RolloutBatch, most: int) -> list[AnswerLeaves]:
        """
        Gives the trajectories of a batch their hints, and returns the contexts with them, of up to `most` tokens. This
        is a collective call.
        """
        siblings: list[str | None] = [None] * len(batch.rows)
        if "sibling" in self._sees:
            siblings = _siblings(batch, everywhere(lambda: _successes(trainer, batch)))

        def give(trajectory: Trajectory, sibling: str | None) -> AnswerLeaves:
            if trajectory.failed or not trajectory.turns:
                return AnswerLeaves()
            hint = trajectory.teacher_hint = self._hint(trajectory, sibling)
            if hint is None:
                return AnswerLeaves()
            return AnswerLeaves.hinted(trajectory, trainer.runner.renderer_of, hint, most)

        given = everywhere(lambda: list(map(give, batch.trajectories, siblings)))
        self._tell(batch, given)
        return given

    def _hint(self, trajectory: Trajectory, sibling: str | None) -> str | None:
        shown = {
            "answer": ("The right answer is", first_answer(trajectory.row.get(ANSWER))),
            "sibling": ("An attempt that was successful:", sibling),
            "feedback": ("What will be said of this attempt:", _feedback(trajectory)),
        }
        parts = [f"{begin}\n{words}" for begin, words in (shown[name] for name in self._sees) if words]
        return "\n\n".join(parts) or None

    def _tell(self, batch: RolloutBatch, given: list[AnswerLeaves]) -> None:
        counts = []
        for trajectory, leaves in zip(batch.trajectories, given, strict=True):
            if trajectory.turns and not trajectory.failed:
                hinted = trajectory.teacher_hint is not None
                turns = sum(turn.num_tokens > 0 for turn in trajectory.turns)
                counts.append((not hinted, hinted and len(leaves.turns) < turns))
        counts = gather_object(counts)
        without, cut = (sum(each[column] for each in counts) for column in (0, 1))
        # an evaluation may have one conversation of a row, and so no sibling
        trains = batch.mode == "train"
        if (without or cut) and trains and not self._said and PartialState().is_main_process:
            self._said = True
            logger.warning(
                "Of %d conversations of a batch, %d have no hint for their teacher (there is no %s), and of %d some "
                "turns have no place for it, or a context that is too long with it. Nothing is distilled there; "
                "`teacher/coverage` is the share of turns that the teacher reads.",
                len(counts),
                without,
                " and no ".join(self._sees),
                cut,
            )


def _successes(trainer: GRPOTrainer, batch: RolloutBatch) -> list[str | None]:
    """What the policy wrote in each conversation of this process that succeeded."""
    assert batch.scores is not None  # see `needs_outcomes`
    written: list[str | None] = []
    for trajectory, score in zip(batch.trajectories, batch.scores.outcome[0], strict=True):
        texts = map(trainer.runner.renderer.text, filter(None, trajectory.tree.actions()))
        succeeded = score is not None and score >= SUCCESS and not trajectory.failed
        written.append("\n\n".join(text.strip() for text in texts) if succeeded else None)
    return written


def _siblings(batch: RolloutBatch, written: list[str | None]) -> list[str | None]:
    """For each row of this process the first other member of its group that succeeded. A collective call."""
    first, size = PartialState().process_index * len(written), batch.group_size
    of_all = gather_object(written)

    def sibling(number: int) -> str | None:
        begin = number - number % size
        others = (of_all[other] for other in range(begin, begin + size) if other != number)
        return next(filter(None, others), None)

    return [sibling(first + row) for row in range(len(written))]


def _feedback(trajectory: Trajectory) -> str:
    """What the environment says of a conversation, else what it replied to the last turn, which no turn has read."""
    for name in FEEDBACK:
        if (said := trajectory.info.get(name)) is not None:
            return str(said).strip()
    return "\n\n".join(_text(reply.get("content")) for reply in trajectory.turns[-1].replies).strip()


def _text(content: object) -> str:
    return "".join(map(part_text, content)) if isinstance(content, list) else str(content or "")
