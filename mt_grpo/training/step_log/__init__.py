"""
The log of a trainer's batches and steps. One callback hands them to its sinks: records, warnings, metrics and a table
of conversations. Here is also what people see meanwhile: what the trainer waits for, the few metrics that a script
prints, a few conversations, and the metrics as Prometheus reads them (`metrics_address`).
"""

from __future__ import annotations

import importlib
import re
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text
from torch import Tensor
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback
from trl import GRPOTrainer

from mt_grpo.credit import audit_rewards, uncredited_turn_rewards
from mt_grpo.errors import ConfigError
from mt_grpo.media import part_text
from mt_grpo.runlog.files import to_json
from mt_grpo.runlog.writer import question_of
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.rollout_batch import Columns, RolloutBatch
from mt_grpo.training.step_log.metrics import Metrics
from mt_grpo.training.step_log.records import Outputs, Records, Step, Update, as_record
from mt_grpo.training.step_log.warnings import Warnings
from mt_grpo.trajectory import Message, Trajectory, visible

__all__ = ["Activity", "Outputs", "Step", "StepLog", "Update"]


class Activity:
    """What the trainer waits for (`waits_for`), and its seconds of waiting for each thing, since they were cleared."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.waits_for = "forward and backward"
        self._batch: RolloutBatch | None = None
        self._under_way: Mapping[str, Trajectory] = {}
        self._sessions: Container[str] | None = None

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """`what` is waited for in the block."""
        before, self.waits_for = self.waits_for, what
        start = time.perf_counter()
        try:
            yield
        finally:
            self.waits_for = before
            self.seconds[what] += time.perf_counter() - start

    @contextmanager
    def sampling(
        self, batch: RolloutBatch, under_way: Mapping[str, Trajectory], sessions: Container[str] | None = None
    ) -> Iterator[None]:
        """Conversations are sampled in the block: `batch` gets the finished ones, `under_way` has all others."""
        self._batch, self._under_way, self._sessions = batch, under_way, sessions
        try:
            with self.of("sampling"):
                yield
        finally:
            self._batch, self._under_way, self._sessions = None, {}, None

    def conversations(self) -> list[dict[str, Any]]:
        """Those under way on this process, the oldest first, as `state.json` has them."""
        under_way = list(self._under_way.values())  # a copy, since another thread goes on
        shown = [
            {
                "session": trajectory.session,
                "prompt": question_of(trajectory),
                "turns": len(trajectory.turns),
                "tokens": sum(turn.num_tokens for turn in trajectory.turns),
                "start": trajectory.start,
                "waits_for": "tools" if _waits_for_tools(trajectory) else "sampling",
            }
            for trajectory in under_way
        ]
        return sorted(shown, key=lambda each: each["start"] or 0.0)

    def describe(self) -> str:
        """What is waited for, and while conversations are sampled, how many are finished and their turns so far."""
        batch, sessions = self._batch, self._sessions
        # a copy, since another thread goes on
        items = list(self._under_way.items())
        under_way = [each for session, each in items if sessions is None or session in sessions]
        if batch is None:
            return f"waiting for {self.waits_for}"
        finished = list(batch.trajectories)
        asked = batch.fills.count(False)
        turns = sum(len(trajectory.turns) for trajectory in (*finished, *under_way))
        in_tools = sum(_waits_for_tools(trajectory) for trajectory in under_way)
        return (
            f"{len(finished)} of {asked} conversations, {turns} turns; waiting for sampling "
            f"({len(under_way) - in_tools}) and tools ({in_tools})"
        )


def _waits_for_tools(trajectory: Trajectory) -> bool:
    """Whether the latest turn of a conversation that is under way has no reply yet."""
    return bool(trajectory.turns) and not trajectory.turns[-1].replies


class StepLog(TrainerCallback):
    """Hands each batch (`Step`), each optimiser step (`Update`) and what is logged to its sinks."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        args = self._args = trainer.args
        rewards = [*trainer.turn_reward_funcs, *trainer.outcome_reward_funcs]
        names = self._names = [reward.name for reward in rewards]
        self.activity = Activity()
        self.records = Records(trainer)
        self.warnings = Warnings(rewards, args, trainer.state_scores, self.records.about["tools"])
        self.metrics = Metrics(trainer.reward_weights, names, args.max_staleness > 0 and args.replay is None)
        self.table = _Table(args, trainer.callback_handler.callbacks)
        self._has_turn_rewards = bool(trainer.turn_reward_funcs)
        self._evaluated = (-1, -1)  # step and number of the latest batch of an evaluation
        self.logged: dict[str, float] = {}  # the latest number of each metric
        self.latest = Update()  # the latest optimiser step, which may not be finished
        self._begun = 0.0

    # The trainer calls

    def begin(self, batch: RolloutBatch, number: int, k: int) -> Step:
        """A batch to be sampled after `number` steps, the `k`-th of its step; evaluations count theirs here."""
        if batch.mode == "eval":
            k = self._evaluated[1] + 1 if self._evaluated[0] == number else 0
            self._evaluated = number, k
        return Step(batch, number, k, self._args.process_index * len(batch.rows))

    def take(self, step: Step) -> None:
        """Hands over a batch that is credited. This is a collective call."""
        step.lines = self.records.take(step)  # first: whatever fails after, the conversations are kept
        if step.mode == "train":
            audit = audit_rewards(step.batch.rewards, step.batch.advantages)
            rule = self._args.credit_rule(self._has_turn_rewards)
            uncredited = uncredited_turn_rewards(rule, step.batch.rewards, **self._args.rule_options)
            step.audit = as_record(audit, uncredited, self._names, self.warnings.causal)
            self.records.audits.append(step.audit)
        self.warnings.take(step)
        self.metrics.take(step)
        self.table.take(step)

    def trained(self, inputs: Columns, logps: Tensor, entropies: Tensor) -> None:
        """Takes note of log-probs and entropies, `(B, T)`, of a micro-batch whose loss is computed."""
        if "row_ids" in inputs:  # a checkpoint may hold rows without a number
            self.latest.outputs.append(Outputs.of(inputs, logps, entropies, self._args))

    # TRL calls

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        self.records.begin(state.global_step)
        self.warnings.begin()

    def on_step_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        self._begun = time.perf_counter()
        self.latest = Update(state.global_step, time.time())
        self.activity.seconds.clear()

    def on_step_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        update = self.latest
        update.seconds = time.perf_counter() - self._begun
        update.waits = dict(self.activity.seconds)
        self.records.update(update)
        self.warnings.update(update)
        update.outputs = []

    def on_log(self, args: object, state: TrainerState, control: object, logs: Logs, **kwargs: Any) -> None:
        self.records.log(logs, state.global_step)
        self.logged |= {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}
        self.table.log("train" if kwargs["model"].training else "eval", state.global_step)

    def on_train_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        self.records.write_audit(state.global_step)
        self.records.end()
        self.warnings.end()


_ROWS = 4  # conversations of a log step where `num_completions_to_print` is unset

_STYLES = {"turn": "cyan", "assistant": "green"}  # of messages, by author; others are the environment's

_PRINTED = (
    *("loss", "grad_norm", "learning_rate", "reward", "reward_std", "frac_reward_zero_std", "kl", "entropy"),
    *("completions/mean_length", "completions/clipped_ratio", "tools/call_frequency", "tools/failure_frequency"),
    *("turns/mean", "num_tokens", "step_time", "runtime", "epoch"),
)


Logs = dict[str, Any]
"""Values by name, as metrics are logged."""


def _printed(logs: Logs) -> Logs:
    """Those of `_PRINTED`, the mean of each reward, and what is logged at the end of training."""

    def few(name: str) -> bool:
        return name in _PRINTED or (name.startswith("rewards/") and name.endswith("/mean"))

    def of_evaluation(name: str) -> bool:
        bare = name.removeprefix("eval_")  # what follows may begin with the name of one of several sets
        return bare != name and (few(bare) or any(bare.endswith(f"_{one}") for one in _PRINTED))

    return {
        name: value for name, value in logs.items() if few(name) or of_evaluation(name) or name.startswith("train_")
    }


class _Fewer(TrainerCallback):
    def on_log(self, args: object, state: object, control: object, logs: Logs | None = None, **kwargs: object) -> None:
        super().on_log(args, state, control, logs=_printed(logs or {}), **kwargs)


class FewerProgress(_Fewer, ProgressCallback):
    """Prints beside a bar."""


class FewerPrinter(_Fewer, PrinterCallback):
    """Prints without a bar."""


def print_fewer(callbacks: list[TrainerCallback]) -> None:
    """Puts callbacks that show less in the place of those of transformers."""
    fewer = {ProgressCallback: FewerProgress, PrinterCallback: FewerPrinter}
    for place, callback in enumerate(callbacks):
        if type(callback) in fewer:
            callbacks[place] = fewer[type(callback)]()
        elif type(callback) is TensorBoardCallback:
            callbacks[place] = _NumbersToTensorBoard(callback.tb_writer)


class _Table:
    """Shows conversations when metrics are logged: of the latest batch, and of the first batch of an evaluation."""

    def __init__(self, args: MTGRPOConfig, trackers: list[TrainerCallback]) -> None:
        self.console = Console()  # where the terminal's are printed; another one where something else is drawn
        self._args = args
        self._trackers = trackers
        self._latest: dict[str, tuple[RolloutBatch, Tensor]] = {}

    def take(self, step: Step) -> None:
        """Keeps a batch until metrics are logged."""
        if step.mode == "train" or step.mode not in self._latest:
            self._latest[step.mode] = step.batch, step.advantages

    def log(self, mode: str, number: int) -> None:
        """Shows conversations of training (`"train"`) or of an evaluation (`"eval"`), after `number` steps."""
        latest = self._latest.pop(mode, None)
        if latest is None or self._args.process_index:
            return
        batch, advantages = latest
        ran = [index for index, trajectory in enumerate(batch.trajectories) if trajectory.stop_reason is not None]
        most = _ROWS if self._args.num_completions_to_print is None else self._args.num_completions_to_print
        count = min(most, len(ran))
        chosen = [ran[place * len(ran) // count] for place in range(count)]
        if not chosen:
            return
        rows, texts = [], []
        for index in chosen:
            trajectory = batch.trajectories[index]
            of_turns = advantages[index, : len(trajectory.turns)].tolist()
            extra = {name: values[index] for name, values in batch.extra.items()}
            rows.append(_table_row(number, trajectory, of_turns, extra))
            texts.append(_text(trajectory, of_turns))
        self._send(f"{batch.mode}/conversations", rows, number)
        if self._args.log_completions:
            self._print(texts, batch.mode, number)

    def _send(self, key: str, rows: list[Logs], step: int) -> None:
        for callback in self._trackers:
            if isinstance(callback, TensorBoardCallback):
                text = "\n---\n\n".join(map(_as_markdown, rows))
                callback.tb_writer.add_text(key, text, step)
                callback.tb_writer.flush()
            elif isinstance(callback, TrackioCallback | WandbCallback):
                tracker = importlib.import_module("trackio" if isinstance(callback, TrackioCallback) else "wandb")
                table = tracker.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
                tracker.log({key: table, "train/global_step": step})  # as these callbacks log metrics

    def _print(self, texts: list[Text], mode: str, step: int) -> None:
        what = "step" if mode == "train" else "evaluation at step"
        for number, text in enumerate(texts, 1):
            self.console.print(Rule(f"{what} {step}: conversation {number} of {len(texts)}"), soft_wrap=False)
            self.console.print(text, soft_wrap=True)


def _text(trajectory: Trajectory, advantages: list[float]) -> Text:
    assert trajectory.stop_reason is not None  # it was run
    text = Text()
    for piece in [*_prompt_pieces(trajectory), *_turn_pieces(trajectory)]:
        text.append(_plain([piece]) + "\n", style=_STYLES.get(piece[0], "bright_black"))
    text.append(trajectory.stop_reason.value, style="bold")
    if trajectory.error:
        text.append(f": {visible(trajectory.error)}", style="red")
    if trajectory.where:
        text.append(f"\n{visible(trajectory.traceback)}", style="red")
    for kind, rewards in trajectory.rewards.items():
        for name, value in rewards.items():
            values = value if isinstance(value, list) else [value]
            text.append(f"\n  {kind} reward {visible(name)}: ", style="cyan").append(_numbers(values))
    return text.append("\n  advantage per turn: ", style="cyan").append(_numbers(advantages)).append("\n")


MOST_CHARACTERS = 2000  # of one message; the middle of a longer one is left out

MOST_MESSAGES = 24
"""Of one conversation, headings included and the prompt excluded; the middle of a longer one is left out."""

Piece = tuple[str, str]  # who wrote a message (`assistant`, `tool`, `user`, ...; `turn` for a heading) and its text


def _prompt_pieces(trajectory: Trajectory) -> list[Piece]:
    """What a conversation began with."""
    return [_piece(message) for message in trajectory.prompt]


def _turn_pieces(trajectory: Trajectory) -> list[Piece]:
    """The turns of a conversation: a heading, the words and the calls of the model, and what it was answered."""
    pieces = []
    for number, turn in enumerate(trajectory.turns, 1):
        pieces.append(("turn", f"turn {number}"))
        pieces += [_piece(message) for message in (turn.message, *turn.replies)]
    if len(pieces) <= MOST_MESSAGES:
        return pieces
    half = MOST_MESSAGES // 2
    left = sum(author != "turn" for author, _ in pieces[half:-half])
    return [*pieces[:half], ("turn", f"{left} messages left out"), *pieces[-half:]]


def _plain(pieces: Sequence[Piece]) -> str:
    """Pieces as one text; who wrote a message stands before it, except before the model's."""
    shown = []
    for author, text in pieces:
        prefix = {"turn": "", "assistant": ""}.get(author, f"[{author}] ")
        shown.append(f"--- {text} ---" if author == "turn" else prefix + text)
    return "\n".join(shown)


def _numbers(values: Sequence[float | None]) -> str:
    """One number per turn, `-` where there is none."""
    return ", ".join("-" if value is None else f"{value:.3g}" for value in values)


def _table_row(step: int, trajectory: Trajectory, advantages: Sequence[float], extra: Logs) -> Logs:
    """A conversation as a row of a table: numbers, text and `None`."""
    rewards = trajectory.rewards
    assert trajectory.stop_reason is not None  # it was run
    return {
        "step": step,
        "prompt": _plain(_prompt_pieces(trajectory)),
        "conversation": _plain(_turn_pieces(trajectory)),
        **{visible(name): _numbers(values) for name, values in rewards.get("turn", {}).items()},
        **{visible(name): value for name, value in rewards.get("outcome", {}).items()},
        "advantages": _numbers(advantages),
        "stop_reason": trajectory.stop_reason.value,
        "error": _shorten(visible(trajectory.error or "")),
        **{visible(name): None if value is None else _shorten(visible(str(value))) for name, value in extra.items()},
    }


def _as_markdown(row: Logs) -> str:
    """A row as Markdown: its text as a block in which nothing is markup, all else as a list."""
    blocks = ("prompt", "conversation")
    facts = [f"- {name}: `{value}`" for name, value in row.items() if name not in blocks and value not in (None, "")]
    text = "\n".join(row[name] for name in blocks)
    return "\n".join(["    " + line for line in text.splitlines()] + ["", *facts, ""])


def _shorten(text: str) -> str:
    """A text without its middle where it is longer than `MOST_CHARACTERS`."""
    left = len(text) - MOST_CHARACTERS
    if left <= 0:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]} … {left} characters left out … {text[-half:]}"


def _piece(message: Message) -> Piece:
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(map(part_text, content))
    parts = [message.get("reasoning_content"), content, *map(_call, message.get("tool_calls") or [])]
    texts = [part if isinstance(part, str) else to_json(part) for part in parts if part]
    return visible(message["role"]), _shorten(visible("\n".join(texts).strip()))


def _call(call: dict[str, Any]) -> str:
    function = call.get("function", call)
    return f"{function['name']}({to_json(function.get('arguments', {}))})"


class _NumbersToTensorBoard(TensorBoardCallback):
    """Leaves out what has no number, such as the reward of a batch that failed, of which TensorBoard would warn."""

    def on_log(self, args: object, state: object, control: object, logs: Logs | None = None, **kwargs: object) -> None:
        numbers = {name: value for name, value in (logs or {}).items() if value is not None}
        super().on_log(args, state, control, logs=numbers, **kwargs)


Look = Callable[[], dict[str, dict[str, float]]]
"""What Prometheus is answered: by the name of a metric its numbers, each by the value of its label."""


class _Gauges:
    """A collector of the library: it is asked at each reading."""

    def __init__(self, look: Look, label: str) -> None:
        self._look, self._label = look, label

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        for name, values in sorted(self._look().items()):
            exposed = re.sub(r"\W", "_", name, flags=re.ASCII)  # as Prometheus allows it: `turn_1_reward`
            gauge = GaugeMetricFamily(f"mt_grpo_{exposed}", f"{name} of the {self._label}", labels=[self._label])
            for each, value in values.items():
                gauge.add_metric([each], value)
            yield gauge


@contextmanager
def serving(address: int | str, label: str, look: Look) -> Iterator[None]:
    """Answers Prometheus in the block, at a port or `HOST:PORT`, with what `look` says at each reading."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise ConfigError(
            f"`metrics_address: {address}` needs a package that is not installed: `pip install 'mt-grpo[prometheus]'`."
        ) from None
    host, _, port = str(address).rpartition(":")
    registry = CollectorRegistry()
    registry.register(_Gauges(look, label))
    try:
        server, thread = start_http_server(int(port), host.strip("[]") or "127.0.0.1", registry)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"`metrics_address: {address}` cannot be listened at ({error}): give another port, or none."
        ) from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
