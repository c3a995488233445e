"""What the verification of a task came to."""

from __future__ import annotations

from dataclasses import dataclass

SHOWN_LOG = 20_000
"""Most characters of a log that are kept, from its end."""


class TaskError(Exception):
    """A task could not be started or verified: a failure of the infrastructure, and no reward of the policy's."""


@dataclass(frozen=True)
class Verified:
    """
    What a trial came to: the verifier's numbers by name, the logs of both, what the agent failed of, and the seconds
    that a container took to start, with those of them that were waited for.
    """

    rewards: dict[str, float]
    verifier_log: str
    agent_log: str = ""
    agent_error: str | None = None
    start_seconds: float = 0.0
    start_waited: float = 0.0
