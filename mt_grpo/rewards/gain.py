"""
The log-prob of the right answer in the context of each turn: as the turn reward `information_gain`, by how much a turn
raises it, and as the state score `answer_logprob`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from mt_grpo.errors import ConfigError
from mt_grpo.imports import choose
from mt_grpo.rewards.base import ReadsAnswer, StateScore, TurnReward, reward
from mt_grpo.trajectory import Trajectory, Turn

_GAINS = ("log_prob", "probability")
_SCORERS = ("trainer", "server")


class RightAnswer(ReadsAnswer):
    """
    A reward or a state score that needs the log-prob of the right answer in the context of each turn: the mean over
    the answer's tokens, in nats. A trainer fills it in as `Trajectory.answer_logprobs`, before rewards are asked.

    The log-probs are those of the model itself, at temperature 1, whatever it samples with.

    Args:
        column (`str`, *optional*, defaults to `"answer"`): Column of the right answer: text, a number, a list of
            accepted answers or TriviaQA's record. Of several the first, or the record's `value`, is scored.
        prefix (`str`, *optional*, defaults to `"<answer>"`): What the model writes before an answer. It stands between
            the context and the answer, and is not scored. Its marks, such as `</think>`, are the template's.
        scorer (`str`, *optional*, defaults to `"trainer"`): Who computes log-probs: `"trainer"` or `"server"`.

    Raises:
        ConfigError: If an option has an unusable value.
    """

    name: str

    def __init__(self, column: str = "answer", prefix: str = "<answer>", scorer: str = "trainer") -> None:
        for option, value in (("column", column), ("prefix", prefix)):
            if not isinstance(value, str):
                raise ConfigError(f"The option `{option}` of the reward {self.name!r} is {value!r}: give it text.")
        choose("scorer", scorer, _SCORERS)
        self.column, self.prefix, self.scorer = column, prefix, scorer

    def right_answer(self, value: object) -> str:
        """
        The text to score, from a value of the column.

        Raises:
            ConfigError: If there is none.
        """
        first = value.get("value") if isinstance(value, dict) else value
        if isinstance(first, list):
            first = first[0] if first else None
        text = "" if first is None else str(first).strip()
        if not text:
            raise ConfigError(
                f"The reward {self.name!r} needs a right answer, and the column {self.column!r} of a row has "
                f"{value!r}: leave the row out, or name another column with the option `column`."
            )
        return text

    def answer_at(self, turn: int, row: Mapping[str, object]) -> str | None:
        """
        The text to score in the context of a turn. Override it where each turn of a conversation has a right answer
        of its own.

        Args:
            turn (`int`): Index of the turn, from 0.
            row (`Mapping`): The dataset row, which is all that the answer may depend on.

        Returns:
            `str` or `None`: The right answer; `None` where there is none to score.
        """
        return self.right_answer(row[self.column])

    def logprobs(self, trajectory: Trajectory) -> list[float | None]:
        """
        For each turn the log-prob of the right answer in its context.

        Raises:
            ValueError: If no trainer has filled it in.
        """
        if self.name not in trajectory.answer_logprobs:
            raise ValueError("the trajectory has no log-probs of the answer, which a trainer computes")
        return trajectory.answer_logprobs[self.name]


@reward("information_gain")
class InformationGain(RightAnswer, TurnReward):
    """
    By how much a turn and the reply to it raise the policy's own probability of the right answer (information gain,
    Wang et al. 2025, arXiv 2510.14967). `None` for the last turn, the answer itself, which outcome rewards judge.

    The probability of an answer of L tokens is, as in the paper, `exp(mean of their log-probs)`: its L-th root, so
    that long answers are not all impossible. The paper takes the difference of two such probabilities
    (`gain: probability`); the difference of their logarithms (`gain: log_prob`) also sees gains far below 1.

    The state after a turn is the context of the next one: all that the model was shown, up to where it began to write.
    Summed over the turns, the reward is the value of the last turn's context minus that of the prompt.

    Args:
        column, prefix, scorer (`str`, *optional*): As in `RightAnswer`.
        gain (`str`, *optional*, defaults to `"log_prob"`): `"log_prob"` (nats per token) or `"probability"`.

    Raises:
        ConfigError: If an option has an unusable value.
    """

    def __init__(
        self, column: str = "answer", prefix: str = "<answer>", gain: str = "log_prob", scorer: str = "trainer"
    ) -> None:
        super().__init__(column, prefix, scorer)
        choose("gain", gain, _GAINS)
        self.gain = gain

    def score(self, turn: Turn, trajectory: Trajectory, **row: object) -> float | None:
        states = self.logprobs(trajectory)[turn.index : turn.index + 2]
        before, after = states if len(states) == 2 else (None, None)
        if before is None or after is None:
            return None
        return math.exp(after) - math.exp(before) if self.gain == "probability" else after - before


@reward("answer_logprob")
class AnswerLogprob(RightAnswer, StateScore):
    """
    How likely the policy itself finds the right answer in the state after a turn, which is the context of the next
    one: the mean log-prob of the answer's tokens. `None` after the last turn, which no turn follows.
    """

    def score(self, turn: Turn, trajectory: Trajectory, **row: object) -> float | None:
        after = self.logprobs(trajectory)[turn.index + 1 : turn.index + 2]
        return after[0] if after else None


information_gain = InformationGain()
answer_logprob = AnswerLogprob()
