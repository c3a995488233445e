"""Agents of Harbor's as the policy: they ask it over HTTP, from the task's container or from this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_grpo.envs.env import Outcome
from mt_grpo.envs.protocols import CallProtocol
from mt_grpo.errors import ConfigError
from mt_grpo.integrations.harbor.containers import ENGINES, HOST
from mt_grpo.integrations.harbor.tasks import TASK, Tasks, harbor_value
from mt_grpo.integrations.harbor.verified import TaskError
from mt_grpo.integrations.openai_api.agent import AgentClient, AgentEnv, AgentSource
from mt_grpo.integrations.openai_api.conversation import Conversation
from mt_grpo.rollout.policy import ConversationPolicy

_ALL_INTERFACES = "0.0.0.0"
_KWARGS: dict[str, dict[str, Any]] = {
    "codex": {"disable_web_search": True, "config": {"features": {"multi_agent": False}}},
    "terminus-2": {"record_terminal_session": False},
}
"""Options of agents unless the user gives others: no tools that the policy's server would have to run, no films."""


class HarborAgents(Tasks, AgentSource):
    """
    Tasks of Harbor for one of its agents, such as `terminus-2`, `mini-swe-agent`, `codex` or `claude-code`. What the
    agent samples is a conversation of the policy's, token for token; what Harbor's verifier says in the end is the
    reward.

    Args:
        agent (`str` or `Mapping`): Its name, or the options of Harbor's `AgentConfig`, `name` or `import_path` among
            them. `env` are further variables of its environment, `kwargs` its own options.
        tasks (`str`): A folder of tasks, or of one.
        eval_tasks (`str`, *optional*): The same for evaluation.
        sandbox (`str`, *optional*, defaults to `"docker"`): What runs containers, by Harbor's name.
        host (`str`, *optional*): The name by which containers reach this machine; Docker's and Podman's know it.
        protocol (`CallProtocol`, *optional*): A text protocol for tool calls, see [`AgentSource`].

    Raises:
        ConfigError: If Harbor is not installed, or has no such agent or sandbox; if a folder has no tasks.
    """

    def __init__(
        self,
        agent: str | Mapping[str, Any],
        tasks: str,
        eval_tasks: str | None = None,
        sandbox: str = "docker",
        host: str | None = None,
        protocol: CallProtocol | None = None,
    ) -> None:
        self._of_harbor = harbor_value("agent", agent)
        self.sandbox, self.inside = harbor_value("sandbox", sandbox), self._is_inside()
        if self.inside and host is None and self.sandbox not in ENGINES:
            raise ConfigError(
                f"`agent: {self.name}` works in a container of `{sandbox}`, which runs elsewhere: give the address by "
                "which it reaches this machine as `host`."
            )
        self.seen_as = host or HOST
        Tasks.__init__(self, sandbox, tasks, eval_tasks)
        AgentSource.__init__(self, self._agent_class(), protocol, _ALL_INTERFACES if self.inside else "127.0.0.1")

    @property
    def name(self) -> str:
        return self._of_harbor.name or self._of_harbor.import_path

    def _agent_class(self) -> Any:
        from harbor.agents.factory import AgentFactory

        try:
            return AgentFactory.get_agent_class_from_config(self._of_harbor)
        except (ValueError, ImportError, AttributeError) as error:
            raise ConfigError(f"`agent: {self.name}` is no agent of Harbor's: {error}") from error

    def _is_inside(self) -> bool:
        """Whether the agent asks from its container."""
        from harbor.agents.installed.base import BaseInstalledAgent

        return issubclass(self._agent_class(), BaseInstalledAgent)

    def config(self, client: AgentClient, context_length: int) -> Any:
        """What Harbor is told of the agent: where the policy is, its key, the form of its API, and its context."""
        from harbor.models.model_api_format import ModelApiFormat

        agent = self._agent_class()
        kwargs = _KWARGS.get(self.name, {}) | self._of_harbor.kwargs
        options = getattr(agent, "options_model", None)
        if "model_info" in getattr(options, "model_fields", {}):  # it compacts before the context is full
            info = {"max_input_tokens": context_length, "max_output_tokens": context_length}
            kwargs.setdefault(
                "model_info", info | dict.fromkeys(("input_cost_per_token", "output_cost_per_token"), 0.0)
            )
        spec = getattr(agent, "MODEL_CONNECTION", None)
        formats = getattr(spec, "supported_api_formats", None) or [ModelApiFormat.OPENAI_CHAT_COMPLETIONS]
        asked = self._of_harbor.model_api_format
        anthropic = ModelApiFormat.ANTHROPIC_MESSAGES in ([asked] if asked else formats[:1])
        key = "ANTHROPIC_API_KEY" if anthropic else "OPENAI_API_KEY"
        url = client.base_url.replace(f"//{_ALL_INTERFACES}:", f"//{self.seen_as}:")
        return self._of_harbor.model_copy(
            update={
                "model_name": self._of_harbor.model_name or ("anthropic/policy" if anthropic else "openai/policy"),
                "base_url": url.removesuffix("/v1") if anthropic else url,
                "env": {key: client.api_key, **self._of_harbor.env},
                "kwargs": kwargs,
            }
        )

    async def make(self, row: Mapping[str, object]) -> Any:
        return _HarborAgentEnv(self)


class _HarborAgentEnv(AgentEnv):
    """One conversation of an agent of Harbor's, and the verification of what it did."""

    def __init__(self, source: HarborAgents) -> None:
        super().__init__(source)
        self._tasks = source
        self._failed: Exception | None = None

    async def run(self, policy: ConversationPolicy, row: Mapping[str, object]) -> Outcome:
        """Holds the conversation; a trial without a reward is an error, also where a limit ended the conversation."""
        outcome = await super().run(policy, row)
        if self._failed is not None:
            raise self._failed
        return outcome

    async def work(self, conversation: Conversation, row: Mapping[str, object], client: AgentClient) -> object:
        """A trial, whose agent ends when it does not stop asking beyond its limits."""
        from mt_grpo.integrations.harbor.trial import run_trial

        source = self._tasks
        try:
            config = source.config(client, conversation.policy.context_length)
            done = await run_trial(source.sandbox, str(row[TASK]), config, conversation)
            if not conversation.asked:
                said = done.agent_error or done.agent_log.strip()[-500:] or "it printed nothing"
                raise TaskError(f"No request of {source.name} reached the policy: {said}")
        except Exception as error:  # raised by `run`: a limit that was reached before is not what went wrong
            self._failed = error
            return None
        info = {"verifier_log": done.verifier_log, "agent_log": done.agent_log, "agent_error": done.agent_error}
        return Outcome(done.rewards, info={name: said for name, said in info.items() if said})
