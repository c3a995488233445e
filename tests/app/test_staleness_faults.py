"""Two ranks that sample ahead from a scripted server, and faults: rows are trained once and in order."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from support.app_fixtures import SAVE
from support.forked import start_ranks
from support.in_flight import Held

from mt_grpo.runlog import open_run

pytestmark = pytest.mark.slow
STEPS = 5
QUESTIONS = 14
"""Two for each batch; the last two are evaluated."""
LAST = range(QUESTIONS - 2, QUESTIONS)
OPTIONS = {
    **SAVE,
    "do_eval": True,
    "dataset_train_split": f"train[:{QUESTIONS - 2}]",
    "dataset_test_split": f"train[{QUESTIONS - 2}:]",
    "shuffle_dataset": False,
    "tools": ["support.in_flight.look"],
    "tool_timeout": 0.3,
    "outcome_reward_funcs": ["support.in_flight.Length"],
    "turn_reward_funcs": None,
    "max_turn_length": None,
    "max_completion_length": 512,
    "use_vllm": True,
    "vllm_server_timeout": 2,
    "max_staleness": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "max_steps": STEPS,
    "learning_rate": 0.01,
}


@pytest.fixture
def hold(tokenizer, model_folder):
    """Starts servers."""
    servers = []

    def start(faults: bool = False) -> Held:
        servers.append(Held(tokenizer, model_folder, faults))
        return servers[-1]

    yield start
    for server in servers:
        server.change(dead=True)
        server.http.stop()


@pytest.fixture
def start(tmp_path, recipe):
    """Starts a run of several ranks; those that are left are killed."""
    started = []
    data = tmp_path / "questions.jsonl"
    rows = [{"question": f"What is {number} of Peru", "answer": "Lima"} for number in range(QUESTIONS)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def begin(server, folder=tmp_path / "run", processes=2, **keys):
        sizes = {"per_device_train_batch_size": 4 // processes, "per_device_eval_batch_size": 2 // processes}
        places = {"dataset_name": str(data), "vllm_server_base_url": server.http.url, "output_dir": str(folder)}
        log = folder.with_suffix(".log")
        log.unlink(missing_ok=True)
        arguments = ["-m", "mt_grpo", "train", *recipe(**{**OPTIONS, **sizes, **places, **keys})]
        ranks = start_ranks(arguments, processes, log, {"OMP_NUM_THREADS": "1"})
        started.extend(ranks)
        return ranks

    yield begin
    for rank in started:
        rank.kill()
        rank.wait()


def ended(ranks):
    """Their exit codes; nothing that they started is left."""
    codes = [rank.wait(300) for rank in ranks]
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.killpg(rank.pid, 0)
    return codes


def said(folder):
    """The last words of a run's ranks."""
    text = folder.with_suffix(".log").read_text(errors="replace")
    assert "Traceback" not in text and "never awaited" not in text, text
    return [line for line in text.splitlines() if line.startswith("mt-grpo: ")]


def trained(folder):
    """The conversations of training, by their names: what was asked and said, and how it ended."""
    run = open_run(folder)
    steps = [row["step"] for row in map(json.loads, (folder / "metrics.jsonl").open()) if "loss" in row]
    assert steps == list(range(1, STEPS + 1))
    assert len(set(run.column("session"))) == len(run.column("session"))
    found = {
        each["session"]: (each["prompt"][-1]["content"], each["stop_reason"], each["tree"]["nodes"])
        for each in run.trajectories()
        if each["session"].startswith("train")
    }
    asked = [int(words[0].split()[2]) for _, words in sorted(found.items())]
    assert asked == [row // 2 for row in range(4 * STEPS)]
    return found


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("whole") / "run"


@pytest.fixture
def goes_on(kept, start, hold, tmp_path):
    """Resumes a run, if it has not ended; it ends as a run of two ranks does that nothing happens to."""
    if not kept.exists():
        assert ended(start(hold(), kept)) == [0, 0]

    def check(server=None):
        if server is not None:
            assert ended(start(server, resume_from_checkpoint=True)) == [0, 0]
        one, two = kept, tmp_path / "run"
        assert not said(two) and trained(one) == trained(two)
        weights = [load_file(folder / "model.safetensors") for folder in (one, two)]
        for name, weight in weights[0].items():
            torch.testing.assert_close(weights[1][name], weight, rtol=0, atol=0)

    return check


def test_what_fails_in_flight_is_trained_once_in_order(tmp_path, start, hold):
    """Conversations end with an error, and a whole batch of them; with and without batches in flight."""
    found = []
    for processes, staleness in ((1, 0), (2, 1), (2, 2)):
        server, folder = hold(faults=True), tmp_path / f"{processes}-{staleness}"
        ranks = start(server, folder, processes, env="support.in_flight.Raising", max_staleness=staleness)
        assert ended(ranks) == [0] * processes and not said(folder)
        assert server.questions == {*range(2 * STEPS), *LAST}  # none past the last step
        found.append(trained(folder))
    assert found[0] == found[1] == found[2]
    assert {reason for _, reason, _ in found[0].values()} >= {"answered", "env_error", "engine_error"}


def test_a_server_killed_in_a_sync_ends_both_ranks(tmp_path, start, hold, goes_on):
    """With batches in flight. The run says where to go on, and goes on there."""
    server, folder = hold(), tmp_path / "run"
    server.change(
        hold=lambda path, question: question in range(6, QUESTIONS - 2),
        dies=lambda asked: asked == "/update_weights" and server.step == "2",
    )
    assert ended(start(server)) == [1, 1]
    (line,) = said(folder)
    assert "No vLLM server answered for 2 s" in line
    assert f"What was learnt up to step 3 is in {folder / 'checkpoint-3'}: go on with" in line
    goes_on(hold())


def test_a_server_restarted_in_a_sync_changes_nothing(start, hold, goes_on):
    """Conversations that were under way are asked for again, with the weights that they would have had."""
    server = hold()
    server.change(dies=lambda asked: asked == "/update_weights" and server.step == "2")
    ranks = start(server, vllm_server_timeout=240)
    server.until(lambda: server.dead, ranks)
    server.restart()
    assert ended(ranks) == [0, 0]
    goes_on()


MOMENTS = {
    "waiting": (3, lambda step, path, question: question == 6),  # for the batch that is to be trained
    "sync": (2, lambda step, path, question: path == "/update_weights" and step == "2"),
    "evaluation": (2, lambda step, path, question: step == "2" and question in LAST),
}
"""The step at which each comes, and how it is known: by the server's weights, a request's path and question."""


@pytest.fixture
def reach(start, hold):
    """Starts a run, and returns its server and its ranks at a moment of it, which is held."""

    def begin(moment, **keys):
        server, (step, comes) = hold(), MOMENTS[moment]
        server.change(hold=lambda *asked: comes(server.step, *asked))
        ranks = start(server, **keys)
        server.until(lambda: server.waiting and server.step == str(step), ranks)
        return server, ranks

    return begin


@pytest.mark.parametrize("moment", ["waiting", "sync"])
def test_a_run_is_preempted_by_a_signal_to_one_rank(tmp_path, reach, goes_on, moment):
    """In the middle of a batch or a sync, which are finished first. No file of weights is left."""
    weights = tmp_path / "weights"
    weights.mkdir()
    server, ranks = reach(moment, weight_sync_folder=str(weights))
    ranks[1].send_signal(signal.SIGUSR1)
    server.change(hold=lambda path, question: False)
    assert ended(ranks) == [75, 75] and not list(weights.iterdir())
    assert "The run was asked to end by SIGUSR1" in (tmp_path / "run.log").read_text()
    goes_on(server)


@pytest.mark.parametrize(
    ("moment", "number", "words"),
    [
        ("sync", signal.SIGINT, "interrupted by Ctrl-C"),
        ("evaluation", signal.SIGTERM, "ended by SIGTERM"),
    ],
)
def test_a_signal_in_flight_ends_both_ranks(tmp_path, reach, goes_on, moment, number, words):
    server, ranks = reach(moment)
    for rank in ranks:
        rank.send_signal(number)
    assert ended(ranks) == [128 + number] * 2
    (line,) = said(tmp_path / "run")
    assert line.startswith(f"mt-grpo: {words}. ") and "--resume_from_checkpoint" in line
    server.change(hold=lambda path, question: False)
    goes_on(server)
