"""Conversations in the containers of tasks, and the tasks as rows."""

from __future__ import annotations

import importlib.util
import logging
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset

from mt_grpo.envs.env import ConversationEnded, Outcome, Policy, Step
from mt_grpo.envs.registry import environment, tool_arguments
from mt_grpo.envs.source import Prototype
from mt_grpo.envs.tool_env import MultiTurnToolEnv
from mt_grpo.errors import ConfigError
from mt_grpo.integrations.harbor.containers import ENGINES, remove_leftovers, write_overlay
from mt_grpo.integrations.harbor.shell import Shell
from mt_grpo.tools import load_tools
from mt_grpo.trajectory import Turn

logger = logging.getLogger(__name__)

TASK = "task"
"""The column with the folder of a row's task."""
SHOWN_LOG = 20_000
"""Most characters of a verifier's log that are kept, from its end."""
AGENT_SECONDS = 1e7
"""The time that Harbor gives the agent. Sampling counts in it, so the limits of the run hold instead."""
SYSTEM_PROMPT = (
    "You work in the shell of a Linux machine. Solve the task with commands, look at what they print, and call submit "
    "when it is done."
)


class TaskError(Exception):
    """A task could not be started or verified: a failure of the infrastructure, and no reward of the policy's."""


class HarborEnv(MultiTurnToolEnv):
    """
    One task per conversation: the model has a shell in the task's container, and what Harbor's verifier says of the
    container in the end is the reward.

    Args:
        sandbox (`str`, *optional*, defaults to `"docker"`): What runs containers, by Harbor's name: `docker`,
            `podman`, `e2b`, `daytona`, `modal` and others.
        tool_timeout (`float`, *optional*, defaults to `60.0`): Seconds that a command may take.
        **options: Of `MultiTurnToolEnv`; `max_steps` is 30 by default.

    Raises:
        ConfigError: If Harbor is not installed, or has no such sandbox.
    """

    def __init__(self, sandbox: str = "docker", tool_timeout: float | None = 60.0, **options: Any) -> None:
        self.sandbox = check_sandbox(sandbox)
        self.command_seconds = 60.0 if tool_timeout is None else tool_timeout
        options = {"system_prompt": SYSTEM_PROMPT, "max_steps": 30, **options}
        self._shell = Shell()
        super().__init__([self._shell.bash, self._shell.submit], tool_timeout=None, **options)

    async def step(self, turn: Turn) -> Step:
        step = await super().step(turn)
        if self._shell.failure is not None:  # no command of this conversation would succeed any more
            raise TaskError(self._shell.failure)
        return step

    async def run(self, policy: Policy, row: dict[str, Any]) -> Outcome:
        """A trial of Harbor's whose agent is the policy."""
        from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
        from harbor.trial.trial import Trial

        from mt_grpo.integrations.harbor.agent import CONVERSATIONS, PolicyAgent

        outcome, failure = Outcome(), None

        async def talk(container: Any) -> None:
            nonlocal outcome, failure

            async def execute(script: str, seconds: float) -> Any:
                return await container.exec(script, timeout_sec=int(seconds))

            self._shell = shell = Shell(execute, self.command_seconds)
            self.tools = {tool.name: tool for tool in load_tools([shell.bash, shell.submit])}
            try:
                outcome = await MultiTurnToolEnv.run(self, policy, row)
            except ConversationEnded as ended:  # what was done until then is verified all the same
                outcome = Outcome(stop_reason=ended.stop_reason)
            except Exception as error:
                failure = error
                raise

        CONVERSATIONS[policy.session] = talk
        with tempfile.TemporaryDirectory(prefix="mt-grpo-harbor-", ignore_cleanup_errors=True) as folder:
            local = self.sandbox.value in ENGINES
            overlays = [write_overlay(Path(folder, "overlay.json"))] if local else []
            agent = AgentConfig(
                import_path=f"{PolicyAgent.__module__}:{PolicyAgent.__name__}",
                override_timeout_sec=AGENT_SECONDS,
                kwargs={"conversation": policy.session},
            )
            try:
                trial = await Trial.create(
                    TrialConfig(
                        task=TaskConfig(path=Path(row[TASK])),
                        trials_dir=Path(folder),
                        agent=agent,
                        environment=EnvironmentConfig(type=self.sandbox, extra_docker_compose=overlays),
                    )
                )
                result = await trial.run()
            finally:
                del CONVERSATIONS[policy.session]
            if failure is not None:
                raise failure
            if result.verifier_result is None or result.verifier_result.rewards is None:
                raised = result.exception_info
                why = "it gave no reward" if raised is None else f"{raised.exception_type}: {raised.exception_message}"
                raise TaskError(f"The task {row[TASK]} was not verified: {why}")
            log = trial.paths.test_stdout_path
            said = log.read_text(errors="replace")[-SHOWN_LOG:] if log.is_file() else ""
        outcome.rewards = {name: float(value) for name, value in result.verifier_result.rewards.items()}
        outcome.info = {"verifier_log": said, **outcome.info}
        return outcome


class HarborTasks(Prototype):
    """
    Tasks of Harbor: each is a row, `prompt` its instruction, `task` its folder, and its metadata further columns.

    Args:
        env (`HarborEnv`): The environment of its conversations.
        tasks (`str`): A folder of tasks, or of one.
        eval_tasks (`str`, *optional*): The same for evaluation.

    Raises:
        ConfigError: If a folder has no tasks.
    """

    def __init__(self, env: HarborEnv, tasks: str, eval_tasks: str | None = None) -> None:
        super().__init__(env)
        if removed := remove_leftovers(env.sandbox.value):
            logger.warning("Removed %d containers that an earlier run left: %s", len(removed), ", ".join(removed))
        self._folders = {"train": tasks, "eval": eval_tasks}
        for name, folder in (("tasks", tasks), ("eval_tasks", eval_tasks)):
            if folder is not None and not task_folders(folder):
                raise ConfigError(
                    f"`{name}: {folder}` has no tasks of Harbor: a task is a folder with `task.toml` and "
                    "`instruction.md`."
                )

    def rows(self, split: str) -> Dataset | None:
        folder = self._folders[split]
        return None if folder is None else Dataset.from_list([task_row(path) for path in task_folders(folder)])

    def check(self, rows: Dataset, name: str) -> None:
        if TASK not in rows.column_names:
            raise ConfigError(
                f"The {name} has no column `{TASK}`: give the folder of each row's task there, or leave "
                "`dataset_name` out."
            )


@environment("harbor")
def harbor_of_options(options: Mapping[str, Any]) -> HarborTasks:
    """The tasks of `env: {type: harbor}`."""
    own = dict(options["env"])
    given = tool_arguments(options, max_steps=30)
    if given.pop("tools"):
        raise ConfigError("`env: {type: harbor}` has a shell for tools: leave `tools` out.")
    given = {name: value for name, value in given.items() if value is not None}
    return HarborTasks(HarborEnv(own.get("sandbox", "docker"), **given), own["tasks"], own.get("eval_tasks"))


def check_sandbox(name: str) -> Any:
    """Harbor's own value for the name of a sandbox."""
    if importlib.util.find_spec("harbor") is None:
        raise ConfigError(
            "`env: {type: harbor}` needs Harbor, which is not installed: `pip install mt-grpo[harbor]`, with Python "
            "3.12 or later."
        )
    from harbor.models.environment_type import EnvironmentType

    from mt_grpo.imports import did_you_mean

    kinds = [kind.value for kind in EnvironmentType]
    if name not in kinds:
        raise ConfigError(
            f"`sandbox: {name}` is none of Harbor's{did_you_mean(name, kinds)}: it has {', '.join(kinds)}."
        )
    return EnvironmentType(name)


def task_folders(folder: str) -> list[Path]:
    """The folders of tasks in a folder, by name; a folder that is a task itself is its only one."""
    root = Path(folder).expanduser()
    if (root / "task.toml").is_file():
        return [root]
    return sorted(path.parent for path in root.glob("*/task.toml") if (path.parent / "instruction.md").is_file())


def task_row(path: Path) -> dict[str, Any]:
    """A task as a row: its instruction, its folder, and what `[metadata]` says in plain values."""
    try:
        config = tomllib.loads((path / "task.toml").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / 'task.toml'} cannot be read ({error}): mend it, or take the task out.") from error
    metadata = {
        key: value for key, value in config.get("metadata", {}).items() if isinstance(value, (str, int, float))
    }
    prompt = (path / "instruction.md").read_text(errors="replace").strip()
    return {**metadata, "prompt": prompt, TASK: str(path.resolve()), "name": path.name}
