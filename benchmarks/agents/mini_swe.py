"""mini-swe-agent in its text mode, with its own loop, messages and parser, in a sandbox without containers."""

import asyncio
import os
import shlex

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it asks the network otherwise

import litellm
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

from mt_grpo.integrations.harbor.bubblewrap import begin_trial

litellm.suppress_debug_info = True  # of models that it knows no price of
SYSTEM = "Solve the task in the shell."
STEPS = 5
SECONDS = 10.0


class Sandboxed(LocalEnvironment):
    """Its own environment, whose commands run in a conversation's sandbox."""

    def __init__(self, sandbox, loop):
        super().__init__(cwd="/app")
        self.sandbox, self.loop = sandbox, loop

    def execute(self, action, cwd="", *, timeout=None):
        command = f"cd /app; exec 2>&1; timeout {SECONDS} bash -c {shlex.quote(action['command'])}; printf '\n%s' $?"
        running = self.sandbox.exec(command, SECONDS + 5)
        said = asyncio.run_coroutine_threadsafe(running, self.loop).result()
        printed, _, code = said.stdout.rpartition("\n")
        output = {"output": printed, "returncode": int(code), "exception_info": ""}
        self._check_finished(output)
        return output


async def solve(row, client):
    """A conversation in the sandbox of a row's task; the reward is the verifier's."""
    model = LitellmTextbasedModel(
        model_name="openai/policy",
        model_kwargs={"api_base": client.base_url, "api_key": client.api_key},
        cost_tracking="ignore_errors",
    )

    async def talk(sandbox):
        environment = Sandboxed(sandbox, asyncio.get_running_loop())
        texts = {"system_template": SYSTEM, "instance_template": "{{task}}"}
        agent = DefaultAgent(model, environment, step_limit=STEPS, **texts)
        await asyncio.to_thread(agent.run, row["instruction"])

    begun = await begin_trial("bubblewrap", row["task"])
    verified = await begun.talk_in(talk)
    return verified.rewards
