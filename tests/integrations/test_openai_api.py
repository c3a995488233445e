"""The policy over HTTP: what clients of OpenAI's ask for, and what they are told."""

from __future__ import annotations

import asyncio
import io
import json
from base64 import b64encode

import openai
import pytest
from PIL import Image, ImageFile
from support.agents import END, LOOKUP, call, calling_tokenizer, reply, result_of, run_agent, sampled, tool_loop
from support.conversations import user

from mt_grpo.envs.protocols import TagProtocol
from mt_grpo.trajectory import StopReason

OTHER = {**LOOKUP, "function": {**LOOKUP["function"], "name": "ask"}}


def ask(answers, *requests, **options):
    """What one conversation's requests are answered with; errors as they are raised."""
    answered = []

    async def agent(row, client):
        asking = client.openai(max_retries=0)
        for request in requests:
            try:
                answered.append(
                    await asking.chat.completions.create(**{"model": "m", "messages": user("Q1"), **request})
                )
            except openai.APIError as error:
                answered.append(error)

    (trajectory,), runner = run_agent(agent, answers, **options)
    told = ("RefusedError: ", "This model's maximum context length is ")
    assert trajectory.error is None or trajectory.error.startswith(told), trajectory.error
    return answered, trajectory, runner


def forks(trajectory):
    """Why each turn forked, of a conversation that had no error."""
    assert trajectory.error is None
    return [turn.fork_cause for turn in trajectory.turns]


def test_a_loop_with_tools_is_one_sequence():
    (trajectory,), runner = run_agent(tool_loop, [call("Lima", "hm"), call("Peru"), f"Lima{END}"])
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.ANSWERED, "Lima")
    assert trajectory.tree.num_sequences == 1 and trajectory.render_mismatch is None
    assert forks(trajectory) == [None] * 3
    assert [turn.has_result for turn in trajectory.turns] == [True, True, False]
    assert trajectory.turns[0].tool_calls[0].result == 'about {"query": "Lima"}'
    context = calling_tokenizer().decode(runner.engine.requests[2][1])
    assert "hm" in context and "about" in context  # the reasoning that the client did not give back is still there


def test_the_answer_has_the_fields_that_clients_read():
    (answer,), trajectory, _ = ask([call("Lima", "hm")], {"tools": [LOOKUP], "logprobs": True})
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.reasoning_content.strip() == "hm"
    assert choice.message.content is None and choice.message.tool_calls[0].function.name == "lookup"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"query": "Lima"}
    assert [token.logprob for token in choice.logprobs.content] == trajectory.tree.nodes[-1].logprobs
    assert answer.usage.completion_tokens == sampled(trajectory)
    assert answer.usage.prompt_tokens == trajectory.turns[0].context_length


def test_a_stream_has_what_the_whole_answer_has():
    events = []

    async def agent(row, client):
        options = {"model": "m", "messages": user("Q1"), "tools": [LOOKUP], "logprobs": True}
        wanted = {"stream": True, "stream_options": {"include_usage": True}}
        async for event in await client.openai().chat.completions.create(**options, **wanted):
            events.append(event)

    (trajectory,), _ = run_agent(agent, [call("Lima", "hm")])
    deltas = [event.choices[0].delta for event in events[:-1]]
    assert "hm" in "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas)
    (asked,) = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    assert (asked.index, asked.function.name) == (0, "lookup")
    assert events[-2].choices[0].finish_reason == "tool_calls" and not events[-1].choices
    assert events[-1].usage.completion_tokens == sampled(trajectory) and events[0].usage is None
    listed = [event.choices[0].logprobs for event in events[:-1] if event.choices[0].logprobs]
    assert sum(len(each.content) for each in listed) == sampled(trajectory)


def test_a_stop_string_is_trained_and_not_told():
    answered, trajectory, _ = ask([f"<a>4</a>{END}", f"A{END}"], {"stop": "</a>"}, {})
    assert answered[0].choices[0].message.content == "<a>4" and trajectory.turns[0].text == "<a>4</a>"

    async def agent(row, client):
        messages = user("Q1")
        for _ in range(2):
            message = await reply(client, messages, stop=["</a>"])
            messages = [*messages, {"role": "assistant", "content": message.content}, *user("Q2")]

    (trajectory,), _ = run_agent(agent, ["<a>4</a>", f"A{END}"])
    assert trajectory.tree.num_sequences == 1 and forks(trajectory) == [None, None]


def test_several_answers_are_forks_of_one_context():
    (answer,), trajectory, _ = ask([f"A{END}", f"B{END}", f"A{END}"], {"n": 3})
    assert [choice.message.content for choice in answer.choices] == ["A", "B", "A"]
    assert trajectory.tree.num_sequences == 3 and answer.usage.completion_tokens == sampled(trajectory)
    assert trajectory.tree.num_tokens == answer.usage.total_tokens


def test_content_parts_and_other_spellings_go_on():
    async def agent(row, client):
        parts = [{"role": "developer", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "Q1"}]}]
        (made,) = (await reply(client, parts, tools=[LOOKUP])).tool_calls
        again = {"name": made.function.name, "arguments": '{ "query" :  "Lima"}'}
        plain = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q1", "name": "someone"}]
        said = {"role": "assistant", "content": "", "tool_calls": [{"id": "x", "type": "function", "function": again}]}
        result = {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "R"}]}
        await reply(client, [*plain, said, result], tools=[LOOKUP])

    (trajectory,), _ = run_agent(agent, [call("Lima"), f"A{END}"])
    assert forks(trajectory) == [None, None]


def test_a_rewritten_past_a_sub_agent_and_a_summary_fork():
    async def agent(row, client):
        first = await reply(client, user("Q1"))
        await reply(client, user("something else"))
        await reply(client, [*user("Q1"), {"role": "assistant", "content": first.content}, *user("Q2")])
        await reply(client, [*user("Q1"), {"role": "assistant", "content": "sum"}, *user("Q3")])
        return 0.5

    (trajectory,), runner = run_agent(agent, [f"A{number}{END}" for number in range(4)])
    assert trajectory.env_rewards == {"reward": 0.5} and trajectory.tree.num_sequences == 3
    assert forks(trajectory) == [None] + ["messages"] * 3
    assert sum(runner.completion(trajectory).mask) == sampled(trajectory)


@pytest.mark.parametrize("named", ["alike", "anew", "not"])
def test_results_are_known_where_a_client_names_calls_anew(named):
    """agno has names of its own for calls; other clients have others in each request, or none."""

    def both(first, second):
        return call(first).removesuffix(END) + "\n" + call(second)

    def told(said, request):
        messages = user("Q1")
        for turn, message in enumerate(said):
            own = {"alike": f"call_{turn}", "anew": f"call_{turn}_{request}", "not": None}[named]
            calls = [{"id": own and f"{own}_{number}", **made} for number, made in enumerate(message)]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            results = [
                {"role": "tool", "tool_call_id": made["id"], "content": f"about {made['function']['arguments']}"}
                for made in calls
            ]
            messages += results if named == "not" else results[::-1]
        return messages

    async def agent(row, client):
        said = []
        for request in range(3):
            calls = (await reply(client, told(said, request), tools=[LOOKUP])).tool_calls or ()
            said.append([{"type": "function", "function": made.function.model_dump()} for made in calls])

    (trajectory,), runner = run_agent(agent, [both("Lima", "Rome"), both("Peru", "Oslo"), f"Lima{END}"])
    assert forks(trajectory) == [None] * 3 and trajectory.tree.num_sequences == 1
    assert [[made.result for made in turn.tool_calls] for turn in trajectory.turns[:2]] == [
        ['about {"query": "Lima"}', 'about {"query": "Rome"}'],
        ['about {"query": "Peru"}', 'about {"query": "Oslo"}'],
    ]
    assert sum(runner.completion(trajectory).mask) == sampled(trajectory)


@pytest.mark.parametrize("who", ["sub-agent", "handoff"])
def test_a_call_that_another_agent_answers_has_its_result(who):
    """The Agents SDK hands over: the next agent is shown the same conversation, with other instructions and tools."""
    system = [{"role": "system", "content": "You hand over."}] if who == "handoff" else []

    async def agent(row, client):
        first = await reply(client, system + user("Q1"), tools=[LOOKUP])
        if who == "handoff":
            told = [{"role": "system", "content": "You are an expert."}, *user("Q1"), first]
            await reply(client, [*told, result_of(first.tool_calls[0], "It is a city")], tools=[OTHER])
            return
        aid = await reply(client, user("What about Lima?"))
        await reply(client, [*user("Q1"), first, result_of(first.tool_calls[0], aid.content)], tools=[LOOKUP])

    (trajectory,), runner = run_agent(agent, [call("Lima"), f"It is a city{END}", f"A city{END}"])
    assert trajectory.error is None and trajectory.tree.num_sequences == 2
    assert [turn.has_result for turn in trajectory.turns] == [True] + [False] * (len(trajectory.turns) - 1)
    assert [message["content"] for message in trajectory.turns[0].replies] == ["It is a city"]
    assert sum(runner.completion(trajectory).mask) == sampled(trajectory)


@pytest.mark.parametrize(
    ("choice", "calls"), [("auto", 1), ("none", 0), ("required", 1), ({"function": {"name": "lookup"}}, 1)]
)
def test_a_choice_of_tools_is_honoured_as_far_as_it_can_be(choice, calls):
    (answer,), _, runner = ask([call("Lima")], {"tools": [LOOKUP], "tool_choice": choice})
    message = answer.choices[0].message
    assert len(message.tool_calls or ()) == calls and ("<tool_call>" in (message.content or "")) == (calls == 0)
    assert "lookup" in calling_tokenizer().decode(runner.engine.requests[0][1])


def test_a_model_of_text_has_no_image_of_a_request_decoded(monkeypatch):
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("it was decoded"))
    file = io.BytesIO()
    Image.new("1", (2_000, 2_000)).save(file, format="PNG")
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"}}
    few, many = ({"messages": [{"role": "user", "content": [part] * count}]} for count in (2, 20))
    (refusal, other), _, _ = ask([END], few, many)
    assert "this run gives its model text only" in str(refusal)
    assert "A message shows images and sounds of 80,000,000 pixels and samples, and 67,108,864" in str(other)


def nested(depth):
    """A schema in a schema, and so on."""
    return {"type": "object", "properties": {"a": nested(depth - 2)}} if depth > 0 else {"type": "string"}


def of_user(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        ({"messages": []}, "`messages` must be a non-empty list"),
        ({"messages": [{"role": "robot"}]}, "has no role out of"),
        (of_user({"type": "image_url"}), "an image that is no `data:` URL"),
        (
            of_user({"type": "image_url", "image_url": {"url": "data:,x"}}),
            "These messages cannot be shown: The image 'data:,x' cannot be read: it is no base64",
        ),
        (of_user({"type": "input_audio"}), "has a sound that is no `input_audio` with `data`"),
        (of_user({"type": "video"}), "has a part that is no text"),
        ({"messages": [{"role": "user", "content": 3}]}, "is neither text nor a list of parts"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "is nothing that is read: give `tool_calls`"),
        ({"messages": [{"role": "assistant", "content": "A"}]}, "nothing to reply to"),
        ({"tool_choice": "required"}, "give that tool alone"),
        ({"tool_choice": {"function": {"name": "other"}}, "tools": [LOOKUP]}, "`tools` has lookup"),
        ({"response_format": {"type": "json_object"}}, "did not choose"),
        ({"n": 0}, "`n` is 0"),
        ({"n": 1000}, "above 128"),
        ({"top_logprobs": 3, "logprobs": True}, "of the sampled tokens only"),
        ({"stop": [3]}, "`stop` is neither"),
        ({"tools": [{"type": "function"}]}, "no function with a name"),
        ({"functions": [{"name": "a"}]}, "older form"),
        ({"messages": user("Q1") * 2049}, "has 2049 messages, above 2048"),
        ({"tools": [LOOKUP] * 129}, "has 129 tools, above 128"),
        ({"tools": [{**LOOKUP, "function": {"name": "a", "parameters": nested(200)}}]}, "brackets that are too deep"),
        ({"stop": ["a"] * 65}, "has 65 texts, above 64"),
    ],
)
def test_what_cannot_be_honoured_is_refused(request_, problem):
    (error,), trajectory, _ = ask([f"A{END}"], request_)
    assert isinstance(error, openai.BadRequestError) and problem in error.message
    assert not trajectory.turns and problem in trajectory.error


def test_what_the_run_decides_is_warned_of_once(caplog):
    requests = {"temperature": 0.1, "top_p": 1.0, "user": "me"}, {"temperature": 0.2, "extra_body": {"seed": 3}}
    ask([f"A{END}"] * 2, *requests)
    named = [record.args[0] for record in caplog.records if "requests set" in record.message]
    assert named == ["temperature", "seed"]


@pytest.mark.parametrize(
    ("limits", "reason", "says"),
    [
        (
            {"max_completion_tokens": 4},
            StopReason.TOKEN_BUDGET,
            "gives the whole conversation 4 tokens after its prompt, and with these",
        ),
        ({"context_length": 12}, StopReason.CONTEXT_FULL, "context length is 12 tokens, and the messages have 71"),
    ],
)
def test_a_limit_is_an_error_that_clients_know(limits, reason, says):
    long = {"messages": user("What is the capital of Peru " * 9)}
    answered, trajectory, _ = ask(["A B C D E F"] * 3, {}, {} if "context_length" not in limits else long, **limits)
    assert isinstance(answered[-1], openai.BadRequestError) and answered[-1].code == "context_length_exceeded"
    assert trajectory.stop_reason is reason and not trajectory.refusals and says in answered[-1].message


@pytest.mark.parametrize("place", ["tools", "arguments", "messages"])
def test_what_fits_no_context_is_refused_and_can_be_cut(place):
    long = "many words " * 10_000
    tool = {**LOOKUP, "function": {**LOOKUP["function"], "description": long}}
    made = {"id": "x", "type": "function", "function": {"name": "lookup", "arguments": json.dumps({"query": long})}}
    said = [{"role": "assistant", "tool_calls": [made]}, {"role": "tool", "tool_call_id": "x", "content": "R"}]
    asked = {
        "tools": {"tools": [tool]},
        "arguments": {"tools": [LOOKUP], "messages": [*user("Q1"), *said]},
        "messages": {"messages": user("What is the capital of Peru " * 30)},
    }[place]
    answered, trajectory, _ = ask([f"A{END}"], asked, {}, context_length=60 if place == "messages" else 4096)
    assert answered[0].code == "context_length_exceeded" and answered[1].choices[0].message.content == "A"
    assert trajectory.stop_reason is StopReason.ENV_DONE and len(trajectory.turns) == 1


def test_a_clients_own_limit_of_tokens_is_no_failure():
    (answer,), trajectory, _ = ask(["A B C D E F"], {"max_completion_tokens": 2, "max_tokens": 3})
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 2
    assert trajectory.stop_reason is StopReason.ENV_DONE


def test_a_text_protocol_shows_and_reads_the_clients_tools():
    tagged = '<tool>{"name": "lookup", "args": {"query": "Lima"}}</tool>'
    (trajectory,), runner = run_agent(tool_loop, [tagged, f"<answer>Peru</answer>{END}"], protocol=TagProtocol())
    assert trajectory.answer == "<answer>Peru</answer>" and trajectory.turns[1].answer == "Peru"
    assert trajectory.tree.num_sequences == 1 and trajectory.turns[0].has_result
    context = calling_tokenizer().decode(runner.engine.requests[1][1])
    assert '<result>about {"query": "Lima"}</result>' in context and "<tool>" in context
    assert TagProtocol().instructions([])[:20] in context


def test_a_text_protocol_instructs_after_a_system_message():
    async def agent(row, client):
        await reply(client, [{"role": "system", "content": "Be brief."}, *user("Q1")], tools=[LOOKUP])

    _, runner = run_agent(agent, [f"<answer>A</answer>{END}"], protocol=TagProtocol())
    context = calling_tokenizer().decode(runner.engine.requests[0][1])
    assert "Be brief.\n\nSolve the task" in context and context.count('"name": "lookup"') == 1


def test_an_answer_that_arrives_late_is_not_trained():
    async def agent(row, client):
        asked = asyncio.ensure_future(reply(client, user("Q1")))
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.sleep(0.1)
        return 1.0

    (trajectory,), _ = run_agent(agent, [f"A{END}"], latency=5.0)
    assert not trajectory.turns and trajectory.env_rewards == {"reward": 1.0}
