"""
Rewards that come with the package: those the environment gave, what a teacher makes of a turn, and those for trivia
questions answered with a search tool, for keeping to the tag protocol (`<reasoning>` first, then one `<tool>` or one
`<answer>`), for grade-school maths, and for how much likelier a turn makes the right answer.

The values of those for trivia questions are those of Zeng et al. 2025 (arXiv 2505.11821). Their turn rewards are
defined per trajectory: 0.2 × successful / attempted tool calls, and 0.5 if the search results hold an accepted answer.
Here turn rewards are summed over the trajectory's turns, so each of the two is divided among the turns: a turn gets
what the trajectory has earned up to it, minus what it had earned up to the turn before. The sum keeps its scale, and
no later turn changes a reward. Their `answer` column is a string or a number, a list of accepted ones, or the dict of
TriviaQA (`value`, `aliases`, `normalized_aliases`).

For grade-school maths the `answer` column is a number, a string that holds it, or GSM8K's worked solution, which ends
in `#### 1,234`.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

from mt_grpo.errors import ConfigError
from mt_grpo.imports import choose
from mt_grpo.rewards.base import OutcomeReward, ReadsAnswer, StateScore, TurnReward, reward
from mt_grpo.trajectory import Trajectory, Turn


@reward("env_reward")
class EnvReward(OutcomeReward):
    """
    The rewards that the environment gave for the whole conversation, summed.

    Args:
        key (`str`, *optional*): Name of one of them, to take that one alone.
    """

    def __init__(self, key: str | None = None) -> None:
        self.key = key
        if key is not None:
            self.name = f"env_reward/{key}"

    def score(self, trajectory: Trajectory, **row: object) -> float | None:
        given = trajectory.env_rewards
        if self.key is not None:
            return given.get(self.key, given.get("*"))
        return sum(given.values()) if given else None


@reward("step_reward")
class _StepReward(TurnReward):
    """`Turn.reward`; `None` for a turn that was given none."""

    def score(self, turn: Turn, trajectory: Trajectory, **row: object) -> float | None:
        return turn.reward


@reward("teacher_agreement")
class TeacherAgreement(TurnReward):
    """How much likelier a turn is to the run's teacher than to the policy: `Trajectory.teacher_log_ratios`."""

    def score(self, turn: Turn, trajectory: Trajectory, **row: object) -> float | None:
        if not trajectory.teacher_log_ratios:
            raise ValueError("no teacher has read the trajectory: name one in `teacher`")
        return trajectory.teacher_log_ratios[turn.index]


@reward("teacher_log_ratio")
class TeacherLogRatio(StateScore):
    """The mean of `Trajectory.teacher_log_ratios` over the turns so far; `None` where the run's teacher read none."""

    def score(self, turn: Turn, trajectory: Trajectory, **row: object) -> float | None:
        read = [ratio for ratio in trajectory.teacher_log_ratios[: turn.index + 1] if ratio is not None]
        return sum(read) / len(read) if read else None


@reward("reasoning_gym_reward")
class _ReasoningGymReward(OutcomeReward):
    """What the row's task gives for the answer, from 0 to 1; for rows of `dataset_name: reasoning_gym:TASK`."""

    name = "reasoning_gym_reward"

    def score(self, trajectory: Trajectory, task: str, task_options: str, index: int, **row: object) -> float:
        dataset = _dataset(task, task_options)
        try:
            return float(dataset.score_answer(trajectory.answer, dataset[index]))
        except Exception:  # an answer that the task cannot read
            return 0.0


@lru_cache
def _dataset(task: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, **json.loads(options))


_Answer = str | int | float | list[Any] | dict[str, Any]

_APOSTROPHES = "'‘’`´"
_PUNCTUATION = re.compile("[" + re.escape(string.punctuation + _APOSTROPHES + "‚“”„«»‹›–—―…·•¡¿") + "]")
_ARTICLES = {"a", "an", "the"}

_TAGS = ("reasoning", "tool", "answer")
_ACTIONS = ("tool", "answer")
_OPENING = re.compile(rf"<({'|'.join(_TAGS)})>")


@reward("tool_execution_reward_func")
class _ToolExecutionReward(TurnReward):
    """
    0.2 × (share of successful tool calls up to the turn − the share up to the turn before); `None` for a turn without
    attempts. The share is 0 before the first attempt, and a turn that fails after a success earns less than 0.

    Summed over the turns: 0.2 × successes / attempts of the trajectory. A call that could not be parsed is an attempt.
    """

    maximum = 0.2

    def score(self, turn: Turn, trajectory: Trajectory, **row: object) -> float | None:
        if not turn.num_attempts:
            return None
        return 0.2 * (_share(trajectory.turns[: turn.index + 1]) - _share(trajectory.turns[: turn.index]))


class _AcceptedAnswers(ReadsAnswer):
    """A reward that compares with the accepted answers of the column `answer`."""

    def right_answer(self, value: object) -> list[str]:
        return _as_texts(value)


@reward("exist_answer_in_search_results")
class _ExistAnswerInSearchResults(_AcceptedAnswers, TurnReward):
    """
    0.5 on the first turn with a successful tool call whose result holds an accepted answer, 0.0 on the other turns on
    which a tool ran; `None` where none ran. Summed over the turns: 0.5 or 0.0.
    """

    maximum = 0.5

    def score(self, turn: Turn, trajectory: Trajectory, *, answer: _Answer, **row: object) -> float | None:
        if not any(call.executed for call in turn.tool_calls):
            return None
        answers = _accepted_answers(answer)
        earlier = trajectory.turns[: turn.index]
        return 0.5 * (_found(turn, answers) and not any(_found(each, answers) for each in earlier))


@reward("exact_match_reward_func")
class _ExactMatchReward(_AcceptedAnswers, OutcomeReward):
    """1.0 if the final answer equals an accepted answer after normalisation, else 0.0 (also without an answer)."""

    def score(self, trajectory: Trajectory, *, answer: _Answer, **row: object) -> float:
        accepted = {normalize_answer(each) for each in _accepted_answers(answer)}
        return float(trajectory.answer is not None and normalize_answer(trajectory.answer) in accepted)


@reward("exist_answer_reward_func")
class _ExistAnswerReward(_AcceptedAnswers, OutcomeReward):
    """0.5 if the final answer holds an accepted answer, else 0.0 (also without an answer)."""

    maximum = 0.5

    def score(self, trajectory: Trajectory, *, answer: _Answer, **row: object) -> float:
        return 0.5 * (trajectory.answer is not None and _holds_answer(trajectory.answer, _accepted_answers(answer)))


def normalize_answer(text: str) -> str:
    """Lower case without punctuation, articles (if more is left) and extra whitespace, as SQuAD does."""
    tokens = _PUNCTUATION.sub("", text.lower()).split()
    return " ".join([token for token in tokens if token not in _ARTICLES] or tokens)


def _accepted_answers(answer: _Answer) -> list[str]:
    """The accepted strings of an `answer` column; those without a letter or digit are left out."""
    return [each for each in _as_texts(answer) if normalize_answer(each)]


def _as_texts(answer: object) -> list[str]:
    """All strings of an `answer` column; a number is written as in `3` and `0.5`."""
    if isinstance(answer, dict) and "value" in answer:
        answer = [answer["value"], *(answer.get("aliases") or []), *(answer.get("normalized_aliases") or [])]
    texts = [_as_text(each) for each in (answer if isinstance(answer, list) else [answer])]
    found = [text for text in texts if text is not None]
    if not found or len(found) < len(texts):
        raise ValueError(f"{answer!r:.80} is no answer: give text, a number, a list of them, or TriviaQA's record")
    return found


def _as_text(value: object) -> str | None:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # a table with one 0.5 makes all of its numbers fractions
    is_missing = isinstance(value, float) and math.isnan(value)  # an empty cell of a table of numbers
    return str(value) if isinstance(value, str | int | float) and not is_missing else None


def _holds_answer(text: str, answers: Iterable[str]) -> bool:
    """
    Whether the text holds one of the answers as whole normalised tokens: "sol" is in "the Sol system", not in "solid".

    Punctuation inside a word may be a part of it ("U.S.") or set two words apart ("Lima/Callao"): both readings count.
    """
    answers = list(answers)
    return any(
        f" {normalize_answer(read(each))} " in haystack
        for read in (str, _apart)
        for haystack in [f" {normalize_answer(read(text))} "]
        for each in answers
    )


def _apart(text: str) -> str:
    return _PUNCTUATION.sub(lambda match: match[0] if match[0] in _APOSTROPHES else " ", text)


def _share(turns: list[Turn]) -> float:
    """Successful among attempted tool calls; 0 without an attempt."""
    attempts = sum(turn.num_attempts for turn in turns)
    return (attempts - sum(turn.num_failures for turn in turns)) / attempts if attempts else 0.0


def _found(turn: Turn, answers: list[str]) -> bool:
    return any(
        call.executed and call.error is None and _holds_answer(call.result, answers) for call in turn.tool_calls
    )


@reward("format_reward_func")
class _FormatReward(OutcomeReward):
    """0.2 × the mean of `_message_format` over the assistant messages; `None` if there is none."""

    maximum = 0.2

    def score(self, trajectory: Trajectory, **row: object) -> float | None:
        return _mean(trajectory, _message_format)


@reward("xml_reward_func")
class _XmlReward(OutcomeReward):
    """0.2 × the mean of `_message_xml` over the assistant messages; `None` if there is none."""

    maximum = 0.2

    def score(self, trajectory: Trajectory, **row: object) -> float | None:
        return _mean(trajectory, _message_xml)


def _message_format(text: str) -> float:
    """
    How well one message follows the protocol, from 0 to 1.

    - 0.4 × the share of two fields that occur exactly once: the reasoning, and one of tool and answer.
    - 0.2 if no block has whitespace just inside its tags. A message without a block earns nothing here.
    - 0.2 if it starts with `<reasoning>`.
    - 0.2 if it ends with `</tool>` or `</answer>`.

    Whitespace around the whole message does not matter.
    """
    text = text.strip()
    blocks = list(_blocks(text))
    fields = [_count_once(text, blocks, ("reasoning",)), _count_once(text, blocks, _ACTIONS)]
    tight = bool(blocks) and all(content == content.strip() for _, content in blocks)
    starts = text.startswith("<reasoning>")
    ends = text.endswith(tuple(f"</{tag}>" for tag in _ACTIONS))
    return 0.4 * sum(fields) / len(fields) + 0.2 * tight + 0.2 * starts + 0.2 * ends


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Tags and contents. In steps of `find`: a pattern would take a minute for a message of 20,000 opening tags."""
    place, unclosed = 0, set()
    while opening := _OPENING.search(text, place):
        begin, closing = opening.end(), f"</{opening[1]}>"
        end = -1 if closing in unclosed else text.find(closing, begin)
        if end >= 0:
            yield opening[1], text[begin:end]
        else:
            unclosed.add(closing)  # from here on there is none either
        place = begin if end < 0 else end + len(closing)


def _message_xml(text: str) -> float:
    """The share of a message's opening and closing tags that occur exactly once, of each kind in use; else 0."""
    counts = [(text.count(f"<{tag}>"), text.count(f"</{tag}>")) for tag in _TAGS]
    marks = [count == 1 for pair in counts if any(pair) for count in pair]
    return sum(marks) / len(marks) if marks else 0.0


def _count_once(text: str, blocks: list[tuple[str, str]], tags: tuple[str, ...]) -> bool:
    """Whether exactly one block of these tags is there, and no mark of them outside it."""
    openings = sum(text.count(f"<{tag}>") for tag in tags)
    closings = sum(text.count(f"</{tag}>") for tag in tags)
    return sum(tag in tags for tag, _ in blocks) == openings == closings == 1


def _mean(trajectory: Trajectory, score: Callable[[str], float]) -> float | None:
    scores = [score(turn.text) for turn in trajectory.turns]
    return 0.2 * sum(scores) / len(scores) if scores else None


_NUMBER = re.compile(r"(?<!\w)-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}\b)")


@reward("gsm8k_correct_reward_func")
class _Gsm8kCorrectReward(ReadsAnswer, OutcomeReward):
    """1.0 if the number in the final answer equals the number in the `answer` column, else 0.0."""

    def score(self, trajectory: Trajectory, *, answer: str | int | float, **row: object) -> float:
        gold = self.right_answer(answer)
        return float(trajectory.answer is not None and find_number(trajectory.answer) == gold)

    def right_answer(self, value: object) -> Decimal:
        # a float may be written with an exponent, of which a text would end with the last number
        gold = Decimal(str(value)) if isinstance(value, float) else find_number(str(value))
        if gold is None or not gold.is_finite():
            raise ValueError(f"the answer column holds no number: {value!r}")
        return gold


@reward("gsm8k_number_reward_func")
class _Gsm8kNumberReward(OutcomeReward):
    """0.2 if the final answer is a number and nothing else, else 0.0; `$`, `%` and a full stop are allowed."""

    maximum = 0.2

    def score(self, trajectory: Trajectory, **row: object) -> float:
        bare = _plain(trajectory.answer or "").strip().removesuffix(".")
        return 0.2 * (_NUMBER.fullmatch(bare) is not None)


def find_number(text: str) -> Decimal | None:
    """The last number after the last `####`, or in the whole text without one; `None` where there is no number."""
    numbers = _NUMBER.findall(_plain(text.rpartition("####")[2]))
    return Decimal(numbers[-1]) if numbers else None


def _plain(text: str) -> str:
    return _THOUSANDS.sub("", text.replace("−", "-").replace("$", "").replace("%", ""))


_GAINS = ("log_prob", "probability")
_SCORERS = ("trainer", "server")


def first_answer(value: object) -> str:
    """The right answer in a value of a column: text, a number, a list, or TriviaQA's record; empty without one."""
    first = value.get("value") if isinstance(value, dict) else value
    if isinstance(first, list):
        first = first[0] if first else None
    if first is None or first != first:  # NaN, of an empty cell
        return ""
    return (_as_text(first) or str(first)).strip()


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
        """The text to score, from a value of the column."""
        text = first_answer(value)
        if not text:
            raise ConfigError(
                f"The reward {self.name!r} needs a right answer, and the column {self.column!r} of a row has "
                f"{value!r}: leave the row out, or name another column with the option `column`."
            )
        return text

    def answer_at(self, turn: int, row: Mapping[str, object]) -> str | None:
        """
        The text to score in the context of a turn (its index, from 0); `None` where there is none. Override it where
        each turn of a conversation has a right answer of its own. It may depend on the row alone.
        """
        return self.right_answer(row[self.column])

    def logprobs(self, trajectory: Trajectory) -> list[float | None]:
        """For each turn the log-prob of the right answer in its context; `ValueError` if no trainer filled it in."""
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


env_reward = EnvReward()
step_reward = _StepReward()
teacher_agreement = TeacherAgreement()
teacher_log_ratio = TeacherLogRatio()
reasoning_gym_reward = _ReasoningGymReward()
tool_execution_reward_func = _ToolExecutionReward()
exist_answer_in_search_results = _ExistAnswerInSearchResults()
exact_match_reward_func = _ExactMatchReward()
exist_answer_reward_func = _ExistAnswerReward()
format_reward_func = _FormatReward()
xml_reward_func = _XmlReward()
gsm8k_correct_reward_func = _Gsm8kCorrectReward()
gsm8k_number_reward_func = _Gsm8kNumberReward()
information_gain = InformationGain()
answer_logprob = AnswerLogprob()
