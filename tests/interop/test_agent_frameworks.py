"""Agents of frameworks, as the page on any agent shows them, trained for real; `make interop-agents` installs them."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from support.agents import END, Reciting, calling_tokenizer, check_whole, hold, run_agent
from support.models import CPU_RUN, build_model
from support.served import Served
from support.servers import needs_server
from support.trainers import Length, batch, check_log_probs

from mt_grpo.data.terminal import write_tasks
from mt_grpo.envs.protocols import ParsedTurn
from mt_grpo.integrations.openai_api import AgentSource
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.trajectory import StopReason, ToolCall

for package in ("agents", "pydantic_ai", "langgraph", "langchain_openai", "smolagents", "minisweagent"):
    pytest.importorskip(package, reason=f"{package} is not installed: run `make interop-agents`")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "any_agent.md").read_text()
SNIPPETS = dict(re.findall(r"^##+ ([^\n]*)\n(?:(?!^#).)*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))
LOOP = "A loop over an OpenAI client"
LINEAR = [LOOP, "OpenAI Agents SDK", "pydantic-ai", "LangGraph"]
ALL = [*LINEAR, "smolagents"]
ROW = {"prompt": "?", "question": "How many live in Lima?", "answer": "million"}


def load_agent(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.solve


@pytest.fixture
def agent(tmp_path):

    def load(name: str, *changes: tuple[str, str]):
        code = SNIPPETS[name]
        for old, new in changes:
            assert old in code
            code = code.replace(old, new)
        path = tmp_path / "page_agent.py"
        path.write_text(code)
        return load_agent(path)

    return load


def called(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>{END}"


def answers(name: str, last: str = "10 million") -> list[str]:
    """Two calls, one after a thought and one after words, and an answer in the framework's way."""
    end = called("final_answer", answer=last) if name == "smolagents" else last + END
    thought = "<think>\nhm\n</think>\n\n"
    return [thought + called("look_up", city="Lima"), "Wait.\n" + called("look_up", city="Cusco"), end]


class Calling:
    """Takes whatever the model writes for a call, until two have results: a model that knows nothing makes none."""

    stop = ("e", "a", "i")
    native_tools = False
    tags = ()

    def instructions(self, tools):
        return "Look cities up."

    def parse(self, text, tokenizer, context=()):
        seen = re.findall(r"\((\d)\)", tokenizer.decode(list(context)))
        number = int(seen[-1]) if seen else 0
        calls = [] if number == 2 else [ToolCall("look_up", {"city": str(number + 1)})]
        return ParsedTurn({"role": "assistant", "content": text}, calls)

    def replies(self, turn):
        (call,) = turn.tool_calls
        return [{"role": "user", "content": f"{call.result} ({call.result[0]})"}]


def trainer_of(source, folder, model, engine=None, tokenizer=None, **options):
    args = MTGRPOConfig(str(folder), **{"max_completion_length": 400, "seed": 3, **CPU_RUN, **options})
    given = {"engine": engine, "processing_class": tokenizer or calling_tokenizer()}
    rows = Dataset.from_list([ROW] * 2)
    return MTGRPOEnvTrainer(copy.deepcopy(model), source, [], [Length()], args, rows, **given)


def reciting_trainer(name, solve, folder, **options):
    model = build_model(calling_tokenizer(), max_position_embeddings=8192).eval()
    scripts = [answers(name, "million a" + "a" * number) for number in range(4)]
    engine = Reciting(model, lambda session, turn: scripts[int(session.rsplit("-", 1)[1]) % 4][turn])
    return trainer_of(AgentSource(solve), folder, model, engine, max_completion_length=8000, **options)


@pytest.mark.parametrize("name", LINEAR)
def test_an_agent_of_a_framework_is_one_sequence(name, agent, tmp_path):
    trainer = reciting_trainer(name, agent(name), tmp_path)
    inputs = batch(trainer)
    for trajectory in trainer.batch.trajectories:
        assert trajectory.error is None and "million a" in trajectory.answer
        assert trajectory.tree.num_sequences == 1 and trajectory.render_mismatch is None
        assert [turn.fork_cause for turn in trajectory.turns] == [None] * 3
        assert [turn.has_result for turn in trajectory.turns] == [True, True, False]
        assert trajectory.turns[0].tool_calls[0].result == "Lima has 10 million inhabitants."
    check_log_probs(trainer, inputs)


def test_a_framework_that_rewrites_has_the_loss_of_turns_alone(agent, tmp_path):
    """smolagents: three roots, since it writes calls and results as text of its own."""
    losses, gradients = [], []
    group = {"per_device_train_batch_size": 2, "num_generations": 2}  # its system prompt is long
    for forward in ("tree", "turn_by_turn"):
        trainer = reciting_trainer("smolagents", agent("smolagents"), tmp_path, forward=forward, **group)
        trainer.current_gradient_accumulation_steps = 1
        inputs = trainer._generate_and_score_completions([trainer.train_dataset[0]] * 2)
        for trajectory in trainer.batch.trajectories:
            assert trajectory.error is None and trajectory.tree.num_sequences == 3
            assert [turn.fork_cause for turn in trajectory.turns] == [None, "messages", "messages"]
        if forward == "tree":
            check_log_probs(trainer, inputs)
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-6)
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[1].norm() > 0


def check_sampled(trainer):
    """Conversations of a model that knows nothing, which whatever it wrote made three turns each."""
    inputs = batch(trainer)
    for trajectory in trainer.batch.trajectories:
        assert trajectory.error is None and trajectory.tree.num_sequences == 1
        assert [turn.has_result for turn in trajectory.turns] == [True, True, False]
    check_log_probs(trainer, inputs)


@pytest.mark.parametrize("name", LINEAR)
def test_what_a_framework_samples_is_trained(name, agent, tmp_path):
    model = build_model(calling_tokenizer(), max_position_embeddings=2048)
    check_sampled(trainer_of(AgentSource(agent(name), Calling()), tmp_path, model, max_turn_length=16))


@needs_server
@pytest.mark.server
def test_what_a_framework_samples_on_a_server_is_trained(agent, tmp_path):
    with Served(tmp_path) as served:
        for name in LINEAR:
            source = AgentSource(agent(name), Calling())
            client = served.client()
            check_sampled(trainer_of(source, tmp_path, served.model, client, served.tokenizer, max_turn_length=16))


LISTEN = "async def listen(context, events):\n    async for _ in events:\n        pass\n\n\nasync def solve"
RESPONSES = ("OpenAIChatCompletionsModel", "OpenAIResponsesModel")
STREAMED = {
    "OpenAI Agents SDK": [
        ("result = await Runner.run(", "result = Runner.run_streamed("),
        ("    return result", "    async for _ in result.stream_events():\n        pass\n    return result"),
    ],
    "pydantic-ai": [("async def solve", LISTEN), ("model=model)", "model=model, event_stream_handler=listen)")],
    "LangGraph": [('model="policy", ', 'model="policy", streaming=True, ')],
    "smolagents": [("max_steps=4,", "max_steps=4, stream_outputs=True,")],
}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *STREAMED.items(),
        ("OpenAI Agents SDK", [RESPONSES]),
        ("OpenAI Agents SDK", [RESPONSES, *STREAMED["OpenAI Agents SDK"]]),
        ("pydantic-ai", [("OpenAIChatModel", "OpenAIResponsesModel")]),
        ("pydantic-ai", [("OpenAIChatModel", "OpenAIResponsesModel"), *STREAMED["pydantic-ai"]]),
        ("LangGraph", [('model="policy", ', 'model="policy", use_responses_api=True, '), (".content", ".text")]),
    ],
)
def test_streams_and_responses_go_on_as_well(name, changes, agent):
    trajectory, runner = hold(agent(name, *changes), answers(name), rows=[ROW])
    sequences = 3 if name == "smolagents" else 1
    assert (len(trajectory.turns), trajectory.tree.num_sequences) == (3, sequences)
    check_whole(trajectory, runner)


HANDOFF = '''
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def look_up(city: str) -> str:
    """Looks up the population of a city."""
    return f"{city} has 10 million inhabitants."


async def solve(row, client):
    model = OpenAIChatCompletionsModel("policy", client.openai())
    aid = Agent("Aid", instructions="You count.", model=model)
    tools = [look_up, aid.as_tool("ask_aid", "Asks for help.")]
    expert = Agent("Expert", instructions="You know cities.", tools=tools, model=model)
    front = Agent("Front", instructions="Hand over.", handoffs=[expert], model=model)
    return (await Runner.run(front, row["question"])).final_output
'''


@pytest.mark.parametrize("changes", [[], [RESPONSES]])
def test_handoffs_and_sub_agents_are_roots_of_one_trajectory(changes, agent, monkeypatch):
    monkeypatch.setitem(SNIPPETS, "handoff", HANDOFF)
    turns = [called("transfer_to_expert"), called("look_up", city="Lima"), called("ask_aid", input="What?")]
    turns += [f"Much.{END}", f"10 million{END}"]
    trajectory, runner = hold(agent("handoff", *changes), turns, rows=[ROW])
    assert (trajectory.answer, trajectory.tree.num_sequences) == ("10 million", 3)
    assert [turn.has_result for turn in trajectory.turns] == [True, True, True, False, False]
    assert "Expert" in trajectory.turns[0].tool_calls[0].result and trajectory.turns[2].tool_calls[0].result == "Much."
    check_whole(trajectory, runner)


PATIENT = ("client.openai()", "client.openai(timeout=0.5, max_retries=20)")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("OpenAI Agents SDK", PATIENT),
        ("pydantic-ai", PATIENT),
        ("LangGraph", ('model="policy", ', 'model="policy", timeout=0.5, max_retries=20, ')),
        ("smolagents", ('"policy", ', '"policy", client_kwargs={"timeout": 0.5, "max_retries": 20}, ')),
    ],
)
def test_a_client_that_tries_again_trains_nothing_twice(name, change, agent):
    def latency(session, turn):
        return 0.0 if turn else 1.2

    trajectory, runner = hold(agent(name, change), answers(name), rows=[ROW], latency=latency)
    assert len(trajectory.turns) == len(runner.engine.requests) == 3
    check_whole(trajectory, runner)


FEW_STEPS = {
    "OpenAI Agents SDK": [("max_turns=4", "max_turns=1")],
    "pydantic-ai": [
        ("import Agent\n", "import Agent, UsageLimits\n"),
        ("model=model)\n", "model=model, usage_limits=UsageLimits(request_limit=1))\n"),
    ],
    "LangGraph": [('row["question"])]}', 'row["question"])]}, {"recursion_limit": 2}')],
}


@pytest.mark.parametrize("name", FEW_STEPS)
def test_an_error_of_a_framework_ends_its_conversation_alone(name, agent):
    strict, plain = agent(name, *FEW_STEPS[name]), agent(name)

    async def some(row, client):
        return await (strict if row["number"] == 1 else plain)(row, client)

    (first, failed, last), runner = run_agent(some, answers(name), rows=[ROW] * 3)
    assert (first.error, last.error) == (None, None) and len(first.turns) == len(last.turns) == 3
    assert failed.stop_reason is StopReason.ENV_ERROR and len(failed.turns) == 1
    check_whole(failed, runner)


@pytest.mark.parametrize("name", ALL)
def test_a_limit_is_why_an_agent_of_a_framework_ends(name, agent):
    length = len(calling_tokenizer().encode(answers(name)[0]))
    trajectory, _ = hold(agent(name), answers(name), rows=[ROW], max_completion_tokens=length + 3)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.TOKEN_BUDGET, 1)


def test_typed_output_is_a_call_that_the_model_may_miss(agent):
    """pydantic-ai asks for a call of its own, which is not forced, and asks again where there is none."""
    typed = agent("pydantic-ai", ("model=model)", "model=model, output_type=list[int])"), (".output", ".output[0]"))
    turns = [called("look_up", city="Lima"), f"10{END}", called("final_result", response=[10])]
    trajectory, _ = hold(typed, turns, rows=[ROW])
    assert (trajectory.env_rewards, trajectory.tree.num_sequences) == ({"reward": 10.0}, 1)


# mini-swe-agent in its text mode, as `benchmarks/terminal.py` trains it


@pytest.fixture
def shell_task(tmp_path):
    (task,) = write_tasks(tmp_path / "tasks", 1, kinds=("count",))
    return {"instruction": (task / "instruction.md").read_text(), "task": str(task)}


def in_shell(*commands: str) -> list[str]:
    return [f"```mswea_bash_command\n{command}\n```{END}" for command in commands]


def test_mini_swe_agent_earns_what_its_commands_did(shell_task):
    solution = (Path(shell_task["task"]) / "solution" / "solve.sh").read_text().splitlines()[-1]
    turns = in_shell("ls /app", solution, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    trajectory, runner = hold(load_agent(ROOT / "benchmarks/agents/mini_swe.py"), turns, rows=[shell_task])
    assert (trajectory.env_rewards, trajectory.tree.num_sequences) == ({"reward": 1.0}, 1)
    assert "service.log" in trajectory.turns[0].replies[0]["content"]
    check_whole(trajectory, runner)


def test_mini_swe_agent_does_not_ask_again_at_a_limit(shell_task, monkeypatch):
    """litellm has to know the error of a full context: what it does not know is asked ten times, over minutes."""
    waited = []
    monkeypatch.setattr("tenacity.nap.time.sleep", waited.append)
    turns, length = in_shell("ls /app", "ls /app"), len(calling_tokenizer().encode(in_shell("ls /app")[0]))
    solve = load_agent(ROOT / "benchmarks/agents/mini_swe.py")
    trajectory, _ = hold(solve, turns, fails=True, rows=[shell_task], max_completion_tokens=length + 3)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.TOKEN_BUDGET, 1)
    assert not [seconds for seconds in waited if seconds >= 4]
