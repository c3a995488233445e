"""A scripted server that a test holds with conversations in flight, their tools, and an environment that fails."""

from __future__ import annotations

import asyncio
import os
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rewards import OutcomeReward
from support.models import build_model
from support.replicas import Replica
from support.waiting import LIMIT

QUESTION = re.compile(r"What is (\d+) of Peru")
CALL = '<tool>{{"name": "look", "args": {{"query": "{}"}}}}</tool>'


async def look(query: str) -> str:
    """
    Looks a query up. The second rank's tools are slower.

    Args:
        query: What to look for.
    """
    if query == "hang":
        await asyncio.Event().wait()
    await asyncio.sleep(random.random() * (0.01 + 0.04 * int(os.environ.get("RANK", "0"))))
    return f"about {query}"


class Raising(MultiTurnToolEnv):
    """Fails where the model says so."""

    async def step(self, turn):
        if "raise" in turn.text:
            raise ConnectionError("the container is gone")
        return await super().step(turn)


class Length(OutcomeReward):
    """The second rank takes longer to judge, and so to train."""

    def score(self, trajectory, **row):
        time.sleep(0.005 * int(os.environ.get("RANK", "0")))
        return float(sum(turn.num_tokens for turn in trajectory.turns))


class Held(Replica):
    """
    A server that says the same whatever its weights are: what a request's seed and its question decide.

    Args:
        tokenizer, folder: Of the model.
        faults (`bool`): Whether some conversations go wrong.
        port (`int`): Where it listens.
    """

    def __init__(self, tokenizer: Any, folder: Any, faults: bool = False, port: int = 0) -> None:
        self.faults = faults
        self.hold: Callable[[str, int | None], bool] = lambda path, question: False
        """Whether a request waits: by its path, and for a completion by the number of its question."""
        self.dies: Callable[[str], bool] = lambda path: False
        """Whether the server is killed by a request for a path, before it answers."""
        self.waiting: list[tuple[str, int | None]] = []
        self.questions: set[int] = set()
        """Those that it was asked."""
        self.dead, self.lives = False, 1
        self._changed = threading.Condition()
        super().__init__(tokenizer, port=port, folder=folder, max_position_embeddings=1024)

    @property
    def step(self) -> str:
        """Whose weights it has."""
        return self.version.split(":")[1] if ":" in self.version else self.version

    def answer(self, method, path, body):
        question = None
        if path == "/v1/completions" and "prompt_logprobs" not in body:
            said = self.tokenizer.decode(body["prompt"])
            question = int(QUESTION.search(said)[1])
            self.questions.add(question)
        with self._changed:
            if self.dies(path):
                self.dead = True
                self._changed.notify_all()
            if self.hold(path, question):
                self.waiting.append((path, question))
                self._changed.notify_all()
                self._changed.wait_for(lambda: self.dead or not self.hold(path, question))
                self.waiting.remove((path, question))
            if self.dead:
                return None
        if path == "/update_weights" and not os.path.exists(body["update_info"]["path"]):
            return 500, "The file is gone."  # and so is the run
        if question is not None:
            return self.said(question, said.count("<|im_start|>assistant"), body)
        return super().answer(method, path, body)

    def said(self, question, turn, body):
        draw = random.Random(f"{question} {body['seed']}")
        fault = draw.random() if self.faults else 1.0
        if self.faults and question in (4, 5) or fault < 0.08:  # of the first, a whole batch
            return 400, {"error": {"message": "no room for this one"}}
        words = f"<answer>{'Lima ' * draw.randint(1, 3)}</answer>"
        if turn < 5 and draw.random() < 0.6:
            words = CALL.format("Lima")
        if 0.08 <= fault < 0.2:
            words = CALL.format("hang" if fault < 0.14 else "raise")
        ids = self.tokenizer.encode(words, add_special_tokens=False)
        tokens = {"tokens": [f"token_id:{token}" for token in ids], "token_logprobs": [-0.5] * len(ids)}
        return 200, {
            "choices": [{"logprobs": tokens, "finish_reason": "stop"}],
            "system_fingerprint": f"{self.http.port}-{self.lives}",
        }

    def change(self, **values: Any) -> None:
        """Sets `hold`, `dies` or `dead`; who waits looks again."""
        with self._changed:
            vars(self).update(values)
            self._changed.notify_all()

    def restart(self) -> None:
        """Begins anew, with the weights that it was started with."""
        self.model = build_model(self.tokenizer, seed=9, max_position_embeddings=1024)
        self.version, self.loaded = "default", "nothing"
        self.change(dead=False, dies=lambda path: False, lives=self.lives + 1)

    def until(self, condition: Callable[[], bool], ranks: list[Any]) -> None:
        """Waits for what the server sees, as long as its clients run."""
        end = time.monotonic() + LIMIT
        with self._changed:
            while not self._changed.wait_for(condition, timeout=0.2):
                assert all(rank.poll() is None for rank in ranks), "a rank has ended"
                assert time.monotonic() < end, f"step {self.step}, waiting {self.waiting}, asked {self.questions}"
