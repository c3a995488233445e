"""
ms-swift's multi-turn schedulers, gym environments and reward classes, see docs/schedulers.md. Files that subclass them
run here unchanged, also under ms-swift's own module names (`mt_grpo.imports`). A scheduler is an environment here: one
scheduler for a run, one environment per conversation. Its own `run` may block, so it runs in an event loop of another
thread (`_run_apart`).
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from datasets import Dataset

from mt_grpo.concurrency import OutOfTime, call, guarded
from mt_grpo.data import lacks_column
from mt_grpo.envs.env import ConversationEnded, Outcome, Policy, RecordedEnv
from mt_grpo.envs.protocols import PROTOCOLS, PlainTextProtocol
from mt_grpo.envs.source import EnvSource, environment
from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean, import_object
from mt_grpo.integrations.swift.builtin import (
    GymScheduler,
    OpenEnvScheduler,
    OpenEnvWrapper,
    RetryScheduler,
    ThinkingTipsScheduler,
    ToolCallScheduler,
)
from mt_grpo.integrations.swift.rewards import (
    ORM,
    Accuracy,
    AsyncORM,
    DefaultRMPlugin,
    TransformersEngine,
    orms,
    rm_plugins,
    to_device,
)
from mt_grpo.integrations.swift.scheduler import (
    CONVERSATION,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    Conversation,
    Env,
    InferEngine,
    Messages,
    MultiTurnScheduler,
    RequestConfig,
    ResponseError,
    RolloutInferRequest,
    RolloutOutput,
    Sampled,
    Template,
    check_infos,
    claim,
    envs,
    get_logger,
    multi_turns,
    remove_response,
    without_images,
)
from mt_grpo.options.table import Values
from mt_grpo.options.values import is_bare
from mt_grpo.trajectory import Row, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# ms-swift's names of the same classes
GYMScheduler, MathAccuracy = GymScheduler, Accuracy
RolloutScheduler, InferRequest = MultiTurnScheduler, RolloutInferRequest

__all__ = ["ORM", "Accuracy", "AsyncORM", "DefaultRMPlugin", "MathAccuracy", "TransformersEngine", "orms"]
__all__ += ["ChatCompletionResponse", "ChatCompletionResponseChoice", "ChatMessage", "InferRequest", "Messages"]
__all__ += ["RequestConfig", "ResponseError", "RolloutInferRequest", "RolloutOutput", "Template", "rm_plugins"]
__all__ += ["Env", "GYMScheduler", "GymScheduler", "OpenEnvScheduler", "OpenEnvWrapper", "envs"]
__all__ += ["MultiTurnScheduler", "RetryScheduler", "RolloutScheduler", "ThinkingTipsScheduler", "ToolCallScheduler"]
__all__ += ["SchedulerEnv", "SchedulerSource", "get_logger", "multi_turns", "remove_response", "to_device"]

logger = logging.getLogger(__name__)
Output = TypeVar("Output")


class SchedulerSource(EnvSource):
    """Makes the environments of a run's conversations, which share a scheduler, made when the first begins."""

    def __init__(
        self,
        scheduler: type[MultiTurnScheduler],
        max_turns: int | None = None,
        loss_scale: str = "all",
        system_prompt: str | None = None,
        tags: tuple[str, ...] = (),
        timeout: float | None = 60.0,
    ) -> None:
        self.scheduler_class, self.max_turns, self.loss_scale = scheduler, max_turns, loss_scale
        self.system_prompt, self.timeout = system_prompt, timeout
        self.protocol = PlainTextProtocol()
        self.protocol.tags = tags
        self._made: MultiTurnScheduler | None = None
        self._making = threading.Lock()
        self._warned = False

    @property
    def __name__(self) -> str:
        return self.scheduler_class.__name__

    async def make(self, row: Row) -> SchedulerEnv:
        return SchedulerEnv(self)

    def check(self, rows: Dataset, name: str) -> None:
        for column in self.scheduler_class.needs_columns:
            if column not in rows.column_names:
                raise lacks_column(f"The scheduler {self.__name__}", column, name, rows.column_names, or_else="")

    async def scheduler(self, tokenizer: PreTrainedTokenizerBase) -> MultiTurnScheduler:
        return self._made or await call(self._make, tokenizer, what=self.__name__, timeout=self.timeout)

    def _make(self, tokenizer: PreTrainedTokenizerBase) -> MultiTurnScheduler:
        with self._making:  # the first conversations all begin at once
            if self._made is None:
                engine = InferEngine(tokenizer)
                parameters = inspect.signature(self.scheduler_class).parameters
                any_name = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
                options = {"infer_engine": engine, "max_turns": self.max_turns}
                made = self.scheduler_class(
                    **{name: value for name, value in options.items() if any_name or name in parameters}
                )
                made.infer_engine, made.max_turns = engine, self.max_turns  # its constructor may not pass them on
                self._made = made
            return self._made

    def warn_of_mask(self) -> None:
        """Warns once that `loss_scale` is ignored, since the scheduler returns masks."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "`loss_scale: %s` is ignored where %s returns a `response_loss_mask`.", self.loss_scale, self.__name__
            )


@environment("scheduler")
def _scheduler_of_options(options: Values) -> SchedulerSource:
    """The scheduler of a run's option `multi_turn_scheduler`."""
    name = options["multi_turn_scheduler"]
    if not is_bare(name):
        found = import_object(name, what="scheduler")
    elif name in multi_turns:
        found = multi_turns[name]
    else:
        raise ConfigError(
            f"There is no scheduler {name!r}{did_you_mean(name, multi_turns)}: choose one of "
            f"{', '.join(multi_turns)}, name the file that adds it to `multi_turns` in "
            "`external_plugins`, or give a dotted path."
        )
    if not (isinstance(found, type) and issubclass(found, MultiTurnScheduler)):
        raise ConfigError(
            f"`multi_turn_scheduler: {name}` leads to {found!r}: give a subclass of `MultiTurnScheduler`, which "
            "is in `mt_grpo.integrations.swift`."
        )
    return SchedulerSource(
        found,
        max_turns=options["max_turns"],
        loss_scale=options["loss_scale"],
        system_prompt=options["system_prompt"],
        tags=PROTOCOLS[options["call_protocol"] or "tags"]().tags,
        timeout=options["tool_timeout"],
    )


class SchedulerEnv(RecordedEnv):
    """One conversation of a scheduler."""

    def __init__(self, source: SchedulerSource) -> None:
        self.source = source
        self.records = []
        self._conversation: Conversation | None = None

    async def run(self, policy: Policy, row: Row) -> Outcome:
        """Has the scheduler run the conversation, and checks what it returns."""
        source = self.source
        scheduler = await source.scheduler(policy.tokenizer)
        conversation = Conversation(policy, source.protocol, source.timeout)
        self._conversation = conversation
        CONVERSATION.set(conversation)
        requests, start = [self._request(policy, row)], scheduler.on_trajectory_start
        await call(start, requests, what=start.__qualname__, timeout=source.timeout)
        last: set[int] = set()
        try:
            outputs = await self._hold(scheduler, conversation, requests[0])
            last = self._keep(outputs, conversation)
        except ConversationEnded:
            pass
        finally:  # also when the conversation runs out of time
            if source.loss_scale == "last_round" and conversation.masked:
                source.warn_of_mask()
            elif source.loss_scale == "last_round":
                _mask_earlier_rounds(conversation.sampled, last or {len(conversation.sampled) - 1})
        infos = _plain(self.records[-1][1]) if self.records else {}
        reason = StopReason.ENV_DONE if conversation.answer is None else StopReason.ANSWERED
        return Outcome(conversation.rewards, conversation.reason or reason, conversation.answer, infos)

    def _request(self, policy: Policy, row: Row) -> RolloutInferRequest:
        prompt, data = copy.deepcopy(row["prompt"]), copy.deepcopy(row)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if messages[-1]["role"] == "assistant":  # a row of a chat dataset ends with the answer
            messages.pop()
        if self.source.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.source.system_prompt})
        data.pop("prompt")
        tools = data.pop("tools", None)
        tools = json.loads(tools) if isinstance(tools, str) else tools  # JSON where the tools differ by row
        messages, images = without_images(messages)
        return RolloutInferRequest(messages, images, tools=tools, data_dict=data, uuid=policy.session)

    async def _hold(
        self, scheduler: MultiTurnScheduler, conversation: Conversation, request: RolloutInferRequest
    ) -> list[RolloutOutput]:
        config = RequestConfig(stop=list(scheduler.stop))
        if type(scheduler).run is MultiTurnScheduler.run:
            output = await scheduler.run(request, config)
        else:
            output = await _run_apart(
                scheduler.run, request, config, idle=conversation.idle, timeout=self.source.timeout
            )
        outputs = output if isinstance(output, list) else [output]
        for one in outputs:
            if not isinstance(one, RolloutOutput):
                raise ResponseError(
                    f"{type(scheduler).__name__}.run returned {type(one).__name__}: return a `RolloutOutput`."
                )
        return outputs

    def _keep(self, outputs: list[RolloutOutput], conversation: Conversation) -> set[int]:
        """Stores the records, sets the masks of the turns, and returns the turns that the records end with."""
        turns, last = conversation.sampled, set()
        for number, output in enumerate(outputs, 1):
            ids, masks, logprobs = output.response_token_ids, output.response_loss_mask, output.rollout_logprobs
            for name, given in (("response_loss_mask", masks), ("rollout_logprobs", logprobs)):
                if given and len(given) != len(ids):
                    raise ResponseError(
                        f"Record {number}: `{name}` is of {len(given)} turns and `response_token_ids` of {len(ids)}: "
                        "make them equal."
                    )
            for turn, response in enumerate(ids):
                where = f"Record {number}, turn {turn + 1}"
                mask = masks[turn] if masks else None
                claim(where, turns, response, mask, logprobs[turn] if logprobs else None)
            conversation.masked |= bool(masks)
            infos = check_infos(f"Record {number}", output.rollout_infos)
            messages = [  # ms-swift's own schedulers write earlier messages of the assistant as plain text
                {"role": "assistant", "content": message} if isinstance(message, str) else copy.deepcopy(message)
                for message in output.messages or ()
            ]
            self.records.append((messages, infos))
            if output.response.id not in {str(one.turn.index) for one in turns}:
                raise ResponseError(
                    f"Record {number}: its `response` has the id {output.response.id!r}, which `infer_async` gave to "
                    "none: leave the id as it is. The records of a `run` are one conversation; several of one prompt "
                    "that share a beginning, as in TreePO, are sampled with `branch_at`."
                )
            last.add(int(output.response.id))
        if any(output.response_token_ids for output in outputs):
            for one in turns:  # a response that is in no record is not trained
                if not one.claimed:
                    one.turn.mask = [0] * len(one.ids)
        return last

    async def close(self) -> None:
        """Calls the scheduler's `on_trajectory_end`."""
        if self._conversation is not None:
            scheduler = await self.source.scheduler(self._conversation.policy.tokenizer)
            end = scheduler.on_trajectory_end
            await call(end, self._conversation.policy.session, what=end.__qualname__)


def _plain(value: object, depth: int = 8) -> Any:
    """A copy that JSON can hold: other objects become text, and what is nested deeper than `depth` is left out."""
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item, depth - 1) for key, item in value.items()} if depth else "..."
    if isinstance(value, list | tuple | set):
        return [_plain(item, depth - 1) for item in value] if depth else "..."
    return str(value)


def _mask_earlier_rounds(sampled: list[Sampled], last: set[int]) -> None:
    """Masks all turns but those of the last round: a record's last turn, and the turns that it continues."""
    trained = False
    for one in reversed(sampled):
        trained = trained or one.turn.index in last
        if not trained:
            one.turn.mask = [0] * len(one.ids)
        trained = trained and one.continues


_MOST_LOOPS = 8  # largest number of event loops; coroutines that share a loop wait for each other when they block


class _Loop:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.users = 0
        threading.Thread(target=self._work, daemon=True, name="scheduler loop").start()

    def _work(self) -> None:
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(left, timeout=1) if left else asyncio.sleep(0))
        finally:
            self.loop.close()


_loops: list[_Loop] = []
_lock = threading.Lock()


async def _run_apart(
    function: Callable[..., Coroutine[object, object, Output]],
    *args: object,
    idle: Callable[[], float],
    timeout: float | None,
) -> Output:
    """Awaits an `async` function of the user's in the event loop of another thread."""
    with _lock:
        if len(_loops) < _MOST_LOOPS:
            _loops.append(_Loop())
        chosen = min(_loops, key=lambda one: one.users)
        chosen.users += 1

    async def work() -> Output:
        return await guarded(function(*args))

    future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), chosen.loop))
    stuck = False
    try:
        while not future.done():
            left = None if timeout is None else max(timeout - idle(), 0.01)
            await asyncio.wait([future], timeout=left)
            stuck = not future.done() and timeout is not None and idle() >= timeout
            if stuck:
                raise OutOfTime(f"{function.__qualname__} took longer than {timeout:g} s between two responses.")
        return future.result()
    finally:
        future.cancel()
        with _lock:
            chosen.users -= 1
            if (stuck or not chosen.users) and chosen in _loops:  # one that may be stuck gets no further coroutine
                _loops.remove(chosen)
            if not chosen.users:
                chosen.loop.call_soon_threadsafe(chosen.loop.stop)
