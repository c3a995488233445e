"""The policy over HTTP: what clients of OpenAI's ask for, and what they are told."""

from __future__ import annotations

import asyncio
import io
import json
from base64 import b64encode

import httpx
import openai
import pytest
from PIL import Image, ImageFile
from support.agents import END, LOOKUP, call, calling_tokenizer, run_agent, sampled, tool_loop
from support.conversations import user

from mt_grpo.envs.protocols import TagProtocol
from mt_grpo.trajectory import StopReason

SYSTEM = [{"role": "system", "content": "You hand over."}]


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


def test_a_loop_with_tools_is_one_sequence():
    answers = [call("Lima", "hm"), call("Peru"), f"Lima{END}"]
    (trajectory,), runner = run_agent(tool_loop, answers)
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.ANSWERED, "Lima")
    assert trajectory.tree.num_sequences == 1 and trajectory.render_mismatch is None
    assert [turn.fork_cause for turn in trajectory.turns] == [None] * 3
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
    tokens = [token for event in events[:-1] for token in (event.choices[0].logprobs or Empty).content]
    assert len(tokens) == sampled(trajectory)


def nested(depth):
    """A schema in a schema, and so on."""
    return {"type": "object", "properties": {"a": nested(depth - 2)}} if depth > 0 else {"type": "string"}


class Empty:
    content = ()


def test_a_stop_string_is_trained_and_not_told():
    requests = {"stop": "</a>"}, {}
    answered, trajectory, runner = ask([f"<a>4</a>{END}", f"A{END}"], *requests)
    assert answered[0].choices[0].message.content == "<a>4" and trajectory.turns[0].text == "<a>4</a>"

    async def agent(row, client):
        asking, messages = client.openai(), user("Q1")
        for _ in range(2):
            answer = await asking.chat.completions.create(model="m", messages=messages, stop=["</a>"])
            messages = [*messages, {"role": "assistant", "content": answer.choices[0].message.content}, *user("Q2")]

    (trajectory,), _ = run_agent(agent, ["<a>4</a>", f"A{END}"])
    assert trajectory.tree.num_sequences == 1 and trajectory.turns[1].fork_cause is None


def test_several_answers_are_forks_of_one_context():
    (answer,), trajectory, _ = ask([f"A{END}", f"B{END}", f"A{END}"], {"n": 3})
    assert [choice.message.content for choice in answer.choices] == ["A", "B", "A"]
    assert trajectory.tree.num_sequences == 3 and answer.usage.completion_tokens == sampled(trajectory)
    assert trajectory.tree.num_tokens == answer.usage.total_tokens


def test_content_parts_and_other_spellings_go_on():
    async def agent(row, client):
        asking = client.openai()
        parts = [{"role": "developer", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "Q1"}]}]
        answer = await asking.chat.completions.create(model="m", messages=parts, tools=[LOOKUP])
        (made,) = answer.choices[0].message.tool_calls
        again = {"name": made.function.name, "arguments": '{ "query" :  "Lima"}'}
        plain = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q1", "name": "someone"}]
        said = {"role": "assistant", "content": "", "tool_calls": [{"id": "x", "type": "function", "function": again}]}
        result = {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "R"}]}
        await asking.chat.completions.create(model="m", messages=[*plain, said, result], tools=[LOOKUP])

    (trajectory,), _ = run_agent(agent, [call("Lima"), f"A{END}"])
    assert trajectory.error is None and [turn.fork_cause for turn in trajectory.turns] == [None, None]


def test_a_rewritten_past_a_sub_agent_and_a_summary_fork():
    async def agent(row, client):
        asking = client.openai().chat.completions
        first = await asking.create(model="m", messages=user("Q1"))
        said = {"role": "assistant", "content": first.choices[0].message.content}
        await asking.create(model="m", messages=user("something else"))
        await asking.create(model="m", messages=[*user("Q1"), said, *user("Q2")])
        await asking.create(model="m", messages=[*user("Q1"), {"role": "assistant", "content": "sum"}, *user("Q3")])
        return 0.5

    (trajectory,), runner = run_agent(agent, [f"A{number}{END}" for number in range(4)])
    assert trajectory.env_rewards == {"reward": 0.5} and trajectory.tree.num_sequences == 3
    assert [turn.fork_cause for turn in trajectory.turns] == [None] + ["messages"] * 3
    row = runner.completion(trajectory)
    assert sum(row.mask) == sampled(trajectory)


def both(first: str, second: str) -> str:
    """A turn with two calls."""
    return call(first).removesuffix(END) + "\n" + call(second)


@pytest.mark.parametrize("named", ["alike", "anew", "not"])
def test_results_are_known_where_a_client_names_calls_anew(named):
    """agno has names of its own for calls; other clients have others in each request, or none."""

    def names(turn, request):
        own = {"alike": f"call_{turn}", "anew": f"call_{turn}_{request}", "not": None}[named]
        return [own and f"{own}_{number}" for number in range(2)]

    def told(said, request):
        messages = user("Q1")
        for turn, message in enumerate(said):
            calls = [{"id": name, **made} for name, made in zip(names(turn, request), message, strict=True)]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            results = [
                {"role": "tool", "tool_call_id": made["id"], "content": f"about {made['function']['arguments']}"}
                for made in calls
            ]
            messages += results if named == "not" else results[::-1]
        return messages

    async def agent(row, client):
        asking, said = client.openai().chat.completions, []
        for request in range(3):
            answer = await asking.create(model="m", messages=told(said, request), tools=[LOOKUP])
            calls = answer.choices[0].message.tool_calls or ()
            said.append([{"type": "function", "function": made.function.model_dump()} for made in calls])

    (trajectory,), runner = run_agent(agent, [both("Lima", "Rome"), both("Peru", "Oslo"), f"Lima{END}"])
    assert trajectory.error is None and trajectory.tree.num_sequences == 1
    assert [turn.fork_cause for turn in trajectory.turns] == [None] * 3
    assert [[made.result for made in turn.tool_calls] for turn in trajectory.turns[:2]] == [
        ['about {"query": "Lima"}', 'about {"query": "Rome"}'],
        ['about {"query": "Peru"}', 'about {"query": "Oslo"}'],
    ]
    assert sum(runner.completion(trajectory).mask) == sampled(trajectory)


def test_a_call_that_a_sub_agent_answers_has_its_result():
    async def agent(row, client):
        asking = client.openai().chat.completions
        first = (await asking.create(model="m", messages=user("Q1"), tools=[LOOKUP])).choices[0].message
        aid = await asking.create(model="m", messages=user("What about Lima?"))
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": aid.choices[0].message.content}
        await asking.create(model="m", messages=[*user("Q1"), first, result], tools=[LOOKUP])

    (trajectory,), _ = run_agent(agent, [call("Lima"), f"It is a city{END}", f"A city{END}"])
    assert trajectory.error is None and trajectory.tree.num_sequences == 2
    assert [turn.has_result for turn in trajectory.turns] == [True, False, False]
    assert trajectory.turns[0].replies[0]["content"] == "It is a city"


def test_a_handoff_answers_the_call_that_made_it():
    """The Agents SDK shows the next agent the same conversation, with other instructions and tools."""
    other = {**LOOKUP, "function": {**LOOKUP["function"], "name": "ask"}}

    async def agent(row, client):
        asking = client.openai().chat.completions
        first = (await asking.create(model="m", messages=SYSTEM + user("Q1"), tools=[LOOKUP])).choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": '{"assistant": "Expert"}'}
        told = [{"role": "system", "content": "You are an expert."}, *user("Q1"), first, result]
        await asking.create(model="m", messages=told, tools=[other])

    (trajectory,), runner = run_agent(agent, [call("Lima"), f"A city{END}"])
    assert trajectory.error is None and trajectory.tree.num_sequences == 2
    assert [turn.has_result for turn in trajectory.turns] == [True, False]
    assert [reply["content"] for reply in trajectory.turns[0].replies] == ['{"assistant": "Expert"}']
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


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        ({"messages": []}, "`messages` must be a non-empty list"),
        ({"messages": [{"role": "robot"}]}, "has no role out of"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "an image that is no `data:` URL"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]},
            "These messages cannot be shown: The image 'data:,x' cannot be read: it is no base64",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "has a sound that is no `input_audio` with `data`",
        ),
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
    assert [record.args[0] for record in caplog.records if "requests set" in record.message] == [
        "temperature",
        "seed",
    ]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"max_completion_tokens": 4}, StopReason.TOKEN_BUDGET), ({"context_length": 12}, StopReason.CONTEXT_FULL)],
)
def test_a_limit_is_an_error_that_clients_know(limits, reason):
    long = {"messages": user("What is the capital of Peru " * 9)}
    answered, trajectory, _ = ask(["A B C D E F"] * 3, {}, {} if "context_length" not in limits else long, **limits)
    assert isinstance(answered[-1], openai.BadRequestError) and answered[-1].code == "context_length_exceeded"
    assert trajectory.stop_reason is reason and not trajectory.refusals
    says = {
        StopReason.CONTEXT_FULL: "context length is 12 tokens, and the messages have 71",
        StopReason.TOKEN_BUDGET: "gives the whole conversation 4 tokens after its prompt, and with these",
    }
    assert says[reason] in answered[-1].message


@pytest.mark.parametrize("place", ["tools", "arguments"])
def test_tools_and_calls_that_fit_no_context_are_refused(place):
    long = "many words " * 10_000
    tool = {**LOOKUP, "function": {**LOOKUP["function"], "description": long}}
    made = {"id": "x", "type": "function", "function": {"name": "lookup", "arguments": json.dumps({"query": long})}}
    said = [{"role": "assistant", "tool_calls": [made]}, {"role": "tool", "tool_call_id": "x", "content": "R"}]
    asked = {"tools": [tool]} if place == "tools" else {"tools": [LOOKUP], "messages": [*user("Q1"), *said]}
    answered, trajectory, _ = ask([f"A{END}"], asked, {})
    assert answered[0].code == "context_length_exceeded" and answered[1].choices[0].message.content == "A"
    assert trajectory.stop_reason is StopReason.ENV_DONE


def test_a_context_that_was_too_long_can_be_cut():
    long = {"messages": user("What is the capital of Peru " * 30)}
    answered, trajectory, _ = ask([f"A{END}"], long, {}, context_length=60)
    assert answered[0].code == "context_length_exceeded" and answered[1].choices[0].message.content == "A"
    assert trajectory.stop_reason is StopReason.ENV_DONE and len(trajectory.turns) == 1


def test_a_clients_own_limit_of_tokens_is_no_failure():
    (answer,), trajectory, _ = ask(["A B C D E F"], {"max_completion_tokens": 2, "max_tokens": 3})
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 2
    assert trajectory.stop_reason is StopReason.ENV_DONE


def test_the_door_is_shut_for_strangers():
    seen = {}

    async def agent(row, client):
        base, server = client.base_url, client.base_url.split("/0")[0]
        async with httpx.AsyncClient(trust_env=False) as web:
            key = {"Authorization": f"Bearer {client.api_key}"}
            asked = {"messages": user("Q1")}
            seen["models"] = await web.get(f"{base}/models", headers=key)
            seen["model"] = await web.get(f"{base}/models/a/b", headers=key)
            seen["no key"] = await web.get(f"{base}/models")
            seen["wrong key"] = await web.get(f"{base}/models", headers={"Authorization": "Bearer x"})
            seen["host"] = await web.get(f"{base}/models", headers={**key, "Host": "evil.example"})
            seen["path"] = await web.get(f"{base}/nothing", headers=key)
            seen["json"] = await web.post(f"{base}/chat/completions", content=b"{", headers=key)
            seen["other"] = await web.post(f"{server}/zzz/v1/chat/completions", json=asked, headers=key)
            seen["unnamed"] = await web.post(f"{server}/v1/chat/completions", json=asked, headers=key)
            named = {**key, "X-Session-ID": client.session}
            seen["named"] = await web.post(f"{server}/v1/chat/completions", json=asked, headers=named)

    (trajectory,), _ = run_agent(agent, [f"A{END}"])
    assert trajectory.error is None
    expected = [200, 200, 401, 401, 403, 404, 400, 404, 404, 200]
    assert [answer.status_code for answer in seen.values()] == expected
    assert all(answer.json()["error"]["message"] for answer in seen.values() if answer.status_code != 200)
    assert seen["model"].json()["id"] == "a/b"


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
        told = [{"role": "system", "content": "Be brief."}, *user("Q1")]
        await client.openai().chat.completions.create(model="m", messages=told, tools=[LOOKUP])

    _, runner = run_agent(agent, [f"<answer>A</answer>{END}"], protocol=TagProtocol())
    context = calling_tokenizer().decode(runner.engine.requests[0][1])
    assert "Be brief.\n\nSolve the task" in context and context.count('"name": "lookup"') == 1


def test_an_answer_that_arrives_late_is_not_trained():
    async def agent(row, client):
        asked = asyncio.ensure_future(client.openai().chat.completions.create(model="m", messages=user("Q1")))
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.sleep(0.1)
        return 1.0

    (trajectory,), _ = run_agent(agent, [f"A{END}"], latency=5.0)
    assert not trajectory.turns and trajectory.env_rewards == {"reward": 1.0}
