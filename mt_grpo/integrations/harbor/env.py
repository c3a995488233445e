"""Conversations in the containers of tasks, in which the policy has a shell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mt_grpo.envs.env import ConversationEnded, Outcome, Policy, Step
from mt_grpo.envs.source import EnvLike, EnvSource, Prototype, environment, source_of, tool_arguments
from mt_grpo.envs.tool_env import MultiTurnToolEnv
from mt_grpo.errors import ConfigError
from mt_grpo.integrations.harbor.containers import BUBBLEWRAP
from mt_grpo.integrations.harbor.pool import Pool
from mt_grpo.integrations.harbor.shell import Shell
from mt_grpo.integrations.harbor.tasks import TASK, Tasks, harbor_value
from mt_grpo.integrations.harbor.verified import TaskError
from mt_grpo.options.table import RunOptions
from mt_grpo.tools import load_tools
from mt_grpo.trajectory import Turn

if TYPE_CHECKING:
    from mt_grpo.integrations.harbor.trial import BegunTrial

SYSTEM_PROMPT = (
    "You work in the shell of a Linux machine. Solve the task with commands, look at what they print, and call submit "
    "when it is done."
)


class HarborEnv(MultiTurnToolEnv):
    """
    One task per conversation: the model has a shell in the task's container, and what Harbor's verifier says of the
    container in the end is the reward.

    Args:
        sandbox (`str`, *optional*, defaults to `"docker"`): What runs containers, by Harbor's name: `docker`,
            `podman`, `e2b`, `daytona`, `modal` and others; or `bubblewrap`, which needs neither Harbor nor containers.
        tool_timeout (`float`, *optional*, defaults to `60.0`): Seconds that a command may take.
        verify_every (`int`, *optional*): Verifies after each so many turns too. The reward of a turn, see
            `step_reward`, is by how much the best so far has grown since the last time.
        sandbox_pool (`int`, *optional*, defaults to `0`): Containers that are started ahead of their conversations.
        **options: Of `MultiTurnToolEnv`; `max_steps` is 30 by default.

    Raises:
        ConfigError: If Harbor is not installed, or has no such sandbox; if an option is no such number.
    """

    def __init__(
        self,
        sandbox: str = "docker",
        tool_timeout: float | None = 60.0,
        verify_every: int | None = None,
        sandbox_pool: int = 0,
        **options: Any,
    ) -> None:
        if verify_every is not None and (not isinstance(verify_every, int) or verify_every < 1):
            raise ConfigError(f"`verify_every: {verify_every}` is no number of turns: give 1 or more.")
        if not isinstance(sandbox_pool, int) or sandbox_pool < 0:
            raise ConfigError(f"`sandbox_pool: {sandbox_pool}` is no number of containers: give 0 or more.")
        if sandbox_pool and sandbox == BUBBLEWRAP:
            raise ConfigError("`sandbox_pool` is of containers, and `sandbox: bubblewrap` has none: leave it out.")
        self.sandbox, self.verify_every = harbor_value("sandbox", sandbox), verify_every
        self.command_seconds = 60.0 if tool_timeout is None else tool_timeout
        options = {"system_prompt": SYSTEM_PROMPT, "max_steps": 30, **options}
        self._shell = Shell()
        self.pool = None if self.sandbox == BUBBLEWRAP else Pool(sandbox_pool, self._begin)
        super().__init__([self._shell.bash, self._shell.submit], tool_timeout=None, **options)

    async def _begin(self, task: str) -> BegunTrial:
        trials = _trials(self.sandbox)
        begun: BegunTrial = await trials.begin_trial(self.sandbox, task, trials.POLICY)
        return begun

    async def step(self, turn: Turn) -> Step:
        step = await super().step(turn)
        if self._shell.failure is not None:  # no command of this conversation would succeed any more
            raise TaskError(self._shell.failure)
        if self.verify_every is not None:
            step.reward = 0.0
            if not step.done and len(self.turns) % self.verify_every == 0:
                found = await _trials(self.sandbox).verify(self._container, self.row[TASK])
                step.reward = max(0.0, (found or 0.0) - self._best)
                self._best += step.reward
        return step

    async def run(self, policy: Policy, row: dict[str, Any]) -> Outcome:
        """A trial whose agent is the policy."""
        outcome, failure = Outcome(), None

        async def talk(container: Any) -> None:
            nonlocal outcome, failure

            async def execute(script: str, seconds: float) -> Any:
                return await container.exec(script, timeout_sec=int(seconds))

            self._container, self._best = container, 0.0
            self._shell = shell = Shell(execute, self.command_seconds)
            self.tools = {tool.name: tool for tool in load_tools([shell.bash, shell.submit])}
            try:
                outcome = await MultiTurnToolEnv.run(self, policy, row)
            except ConversationEnded as ended:  # what was done until then is verified all the same
                outcome = Outcome(stop_reason=ended.stop_reason)
            except Exception as error:
                failure = error
                raise

        try:
            if self.pool is None:
                done = await _trials(self.sandbox).run_policy(self.sandbox, row[TASK], policy.session, talk)
            else:
                done = await _trials(self.sandbox).talk_in(await self.pool.take(row[TASK]), talk)
        except Exception:
            if failure is not None:
                raise failure from None
            raise
        if failure is not None:
            raise failure
        info: dict[str, Any] = {"verifier_log": done.verifier_log}
        if self.pool is not None:
            info |= {"start_seconds": round(done.start_seconds, 3), "start_waited": round(done.start_waited, 3)}
        outcome.rewards, outcome.info = done.rewards, {**info, **outcome.info}
        return outcome


def _trials(sandbox: str) -> ModuleType:
    """What holds trials in a sandbox: Harbor, or our own path without containers."""
    return import_module(f"mt_grpo.integrations.harbor.{'bubblewrap' if sandbox == BUBBLEWRAP else 'trial'}")


class _HarborConversations(Prototype):
    """Conversations whose containers start ahead of them."""

    env: HarborEnv

    def ahead(self, rows: Sequence[dict[str, Any]]) -> AbstractAsyncContextManager[None]:
        if self.env.pool is None:
            return nullcontext()
        return self.env.pool.ahead([row[TASK] for row in rows if TASK in row])


source_of.register(HarborEnv, _HarborConversations)


class HarborTasks(Tasks, _HarborConversations):
    """Folders of Harbor's tasks, for training and for evaluation, as rows for the conversations of `env`."""

    def __init__(self, env: HarborEnv, tasks: str, eval_tasks: str | None = None) -> None:
        Prototype.__init__(self, env)
        Tasks.__init__(self, env.sandbox, tasks, eval_tasks)

    @property
    def given(self) -> EnvLike:
        return self  # an environment alone has no rows


@environment("harbor")
def _harbor_of_options(options: Mapping[str, Any]) -> EnvSource:
    """The tasks of `env: {type: harbor}`."""
    own = dict(options["env"])
    sandbox, agent = own.get("sandbox", "docker"), own.get("agent", "bash")
    if agent != "bash":
        if sandbox == BUBBLEWRAP:
            raise ConfigError(f"`agent: {agent}` is Harbor's and needs its containers: use another `sandbox`.")
        from mt_grpo.integrations.harbor.agents import HarborAgents
        from mt_grpo.integrations.openai_api.agent import protocol_of

        for option in ("system_prompt", "max_env_steps", "env_mask", "tool_timeout"):
            if options[option] not in (None, RunOptions.__dataclass_fields__[option].default):
                raise ConfigError(
                    f"`{option}` is of the shell that `agent: bash` has, and `env: {{agent: {agent}}}` has its own "
                    "loop: leave it out."
                )
        if own.get("verify_every") is not None:
            raise ConfigError(f"`verify_every` is of `agent: bash`: the turns of `{agent}` are its own. Leave it out.")
        if own.get("sandbox_pool"):
            raise ConfigError("`sandbox_pool` is of `agent: bash`: other agents start their own. Leave it out.")
        folders = own["tasks"], own.get("eval_tasks")
        return HarborAgents(agent, *folders, sandbox, own.get("host"), protocol_of(options))
    given = tool_arguments(options, max_steps=30)
    if given.pop("tools"):
        raise ConfigError("`env: {type: harbor}` has a shell for tools: leave `tools` out.")
    given = {name: value for name, value in given.items() if value is not None}
    given |= {name: own[name] for name in ("verify_every", "sandbox_pool") if own.get(name) is not None}
    return HarborTasks(HarborEnv(sandbox, **given), own["tasks"], own.get("eval_tasks"))
