"""A scheduler as an environment: one scheduler for a run, one environment for each of its conversations."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import threading
from typing import Any

from mt_grpo.envs.env import ConversationEnded, Outcome, Policy
from mt_grpo.envs.threads import call
from mt_grpo.integrations.swift.engine import CONVERSATION, Conversation, InferEngine, Words
from mt_grpo.integrations.swift.loops import run_apart
from mt_grpo.integrations.swift.records import (
    ResponseError,
    check_infos,
    claim,
    only_last_rounds,
    plain,
    read_messages,
)
from mt_grpo.integrations.swift.scheduler import MultiTurnScheduler
from mt_grpo.integrations.swift.types import RequestConfig, RolloutInferRequest, RolloutOutput
from mt_grpo.trajectory import Message, StopReason

logger = logging.getLogger(__name__)


class SchedulerSource:
    """
    Makes the environments of a run's conversations, which share a scheduler.

    Args:
        scheduler (`type[MultiTurnScheduler]`): Its class; it is made when the first conversation begins.
        max_turns (`int`, *optional*): Responses of one conversation.
        loss_scale (`str`, *optional*, defaults to `"all"`): `"last_round"` trains the last round only.
        system_prompt (`str`, *optional*): For prompts that bring no system message.
        tags (`tuple[str, ...]`): Added tokens that messages may hold.
        timeout (`float`, *optional*): Seconds that one method of the scheduler may take.
    """

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
        self.protocol = Words(tags)
        self._made: MultiTurnScheduler | None = None
        self._making = threading.Lock()
        self._warned = False

    @property
    def __name__(self) -> str:
        return self.scheduler_class.__name__

    def __call__(self, row: dict[str, Any]) -> SchedulerEnv:
        """The environment of a row."""
        return SchedulerEnv(self)

    async def scheduler(self, tokenizer: Any) -> MultiTurnScheduler:
        """The scheduler of the run."""
        if self._made is None:
            await call(self._make, tokenizer, what=self.__name__, timeout=self.timeout)
        return self._made

    def _make(self, tokenizer: Any) -> None:
        with self._making:  # the first conversations all begin at once
            if self._made is None:
                engine = InferEngine(tokenizer)
                parameters = inspect.signature(self.scheduler_class).parameters
                any_name = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
                options = {"infer_engine": engine, "max_turns": self.max_turns}
                made = self.scheduler_class(
                    **{name: value for name, value in options.items() if any_name or name in parameters}
                )
                made.infer_engine, made.max_turns = engine, self.max_turns  # it may have kept them to itself
                self._made = made

    def warn_of_mask(self) -> None:
        """Says once that a mask goes before `loss_scale`."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "`loss_scale: %s` is ignored where %s returns a `response_loss_mask`.", self.loss_scale, self.__name__
            )


class SchedulerEnv:
    """
    One conversation that a scheduler holds.

    Args:
        source (`SchedulerSource`): Where its scheduler comes from.

    Attributes:
        records (`list[tuple[list[dict], dict]]`): Messages and `rollout_infos` of each record of the trajectory.
    """

    def __init__(self, source: SchedulerSource) -> None:
        self.source = source
        self.records: list[tuple[list[Message], dict[str, Any]]] = []
        self._conversation: Conversation | None = None

    async def run(self, policy: Policy, row: dict[str, Any]) -> Outcome:
        """Lets the scheduler hold the conversation, and checks what it returns."""
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
        finally:  # also of one that is out of time
            if source.loss_scale == "last_round":
                self._mask_rounds(conversation, last)
        infos = plain(self.records[-1][1]) if self.records else {}
        reason = StopReason.ENV_DONE if conversation.answer is None else StopReason.ANSWERED
        return Outcome(conversation.rewards, conversation.reason or reason, conversation.answer, infos)

    def _request(self, policy: Policy, row: dict[str, Any]) -> RolloutInferRequest:
        prompt, data = copy.deepcopy(row["prompt"]), copy.deepcopy(row)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if messages[-1]["role"] == "assistant":  # the answer that a row of a chat dataset ends with
            messages.pop()
        if self.source.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.source.system_prompt})
        data.pop("prompt")
        tools = data.pop("tools", None)
        tools = json.loads(tools) if isinstance(tools, str) else tools  # text where rows have different ones
        return RolloutInferRequest(messages, tools=tools, data_dict=data, uuid=policy.session)

    async def _hold(
        self, scheduler: MultiTurnScheduler, conversation: Conversation, request: RolloutInferRequest
    ) -> list[RolloutOutput]:
        config = RequestConfig(stop=list(scheduler.stop))
        if type(scheduler).run is MultiTurnScheduler.run:
            output = await scheduler.run(request, config)
        else:
            output = await run_apart(
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
        """Keeps records, and writes their masks into the turns; returns the turns that records end with."""
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
            self.records.append((read_messages(output.messages or []), infos))
            last.add(int(output.response.id))
        if any(output.response_token_ids for output in outputs):
            for one in turns:  # a response that no record has is not trained
                if not one.claimed:
                    one.turn.mask = [0] * len(one.ids)
        return last

    def _mask_rounds(self, conversation: Conversation, last: set[int]) -> None:
        if conversation.masked:
            self.source.warn_of_mask()
        elif conversation.sampled:
            only_last_rounds(conversation.sampled, last or {len(conversation.sampled) - 1})

    async def close(self) -> None:
        """Lets go of what the scheduler opened for the conversation."""
        if self._conversation is not None:
            scheduler = await self.source.scheduler(self._conversation.policy.tokenizer)
            end = scheduler.on_trajectory_end
            await call(end, self._conversation.policy.session, what=end.__qualname__)
