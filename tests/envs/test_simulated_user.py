"""A user whom an endpoint plays, against a scripted endpoint on loopback."""

import asyncio
import gzip
import json
import logging
import re
import sys
import threading
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from support.conversations import user
from support.loopback import Loopback, Reply, ScriptedServer
from support.models import build_tokenizer, lookup

from mt_grpo.envs.simulated_user import GREETING, SimulatedUser, SimulatedUserEnv
from mt_grpo.errors import UserError
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.servers import external
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training.environment import build_env, check_env
from mt_grpo.trajectory import StopReason

END = "<|im_end|>"
SEARCH = '<tool>{"name": "lookup", "args": {"query": "Lima"}}</tool>'
KEY = "sk-scripted-0123456789"
CHAT = "/v1/chat/completions"


def said(content):
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return 200, {"id": "1", "object": "chat.completion", "created": 1, "model": "user", "choices": [choice]}


@pytest.fixture
def endpoint():
    """Starts scripted endpoints: each answers the next of a list, the last of it again and again."""
    servers = []

    def start(*answers, models=(200, {"object": "list", "data": []})):
        left = list(answers)

        def script(method, path, body):
            if path != CHAT:
                return models
            return left.pop(0) if len(left) > 1 else left[0]

        servers.append(ScriptedServer(script))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def simulated(server, **options):
    options = {"base_url": f"{server.url}/v1", "model": "user", "system_prompt": "You want {goal}.", **options}
    return SimulatedUser(**options)


def run(partner, turns, rows=({"goal": "pears"},), limits=None, prompt="Hi", **options):
    engine = ScriptedEngine(build_tokenizer(), lambda session, turn: turns[turn] + END)
    runner = RolloutRunner(SimulatedUserEnv(partner, **options), engine, limits, sanity_check_mode="strict")
    requests = [RolloutRequest(prompt, f"{index:03d}", row) for index, row in enumerate(rows)]
    return asyncio.run(runner.run(requests, SamplingParams())), runner


def test_the_user_sees_its_goal_and_its_own_side(endpoint):
    server = endpoint(said("<think>Pears.</think>\n\nDo you have pears?"), said("Thank you. DONE"))
    partner = simulated(server, stop_phrase="DONE", request={"temperature": 0.5, "top_k": 9})
    [trajectory], _ = run(partner, ["<think>A customer.</think>Welcome.", "Yes."])
    assert trajectory.stop_reason is StopReason.ENV_DONE and trajectory.answer == "Yes."
    assert [turn.replies for turn in trajectory.turns] == [user("Do you have pears?"), user("Thank you.")]
    first, second = server.asked(CHAT)
    assert first["model"] == "user" and (first["temperature"], first["top_k"]) == (0.5, 9)
    assert second["messages"] == [
        {"role": "system", "content": "You want pears."},
        {"role": "user", "content": GREETING},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Welcome."},
        {"role": "assistant", "content": "Do you have pears?"},
        {"role": "user", "content": "Yes."},
    ]


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_an_answer_without_end_ends_its_conversation(endpoint, monkeypatch, encoding):
    monkeypatch.setattr(external, "MAX_BYTES", 10_000)
    answer = said("pears " * 20_000)
    if encoding == "gzip":
        packed = gzip.compress(json.dumps(answer[1]).encode())
        server = Loopback(lambda request: Reply(200, packed, len(packed), {"Content-Encoding": "gzip"}))
    else:
        server = endpoint(answer)
    try:
        [trajectory], _ = run(simulated(server, max_retries=0), ["Welcome."])
    finally:
        server.stop()
    assert trajectory.stop_reason is StopReason.ENV_ERROR and len(trajectory.error) < 500
    says = {"identity": "the answer has more than 10,000 bytes", "gzip": "the answer has the encoding 'gzip'"}
    assert says[encoding] in trajectory.error


def test_the_tokens_of_the_user_are_masked(endpoint):
    [trajectory], runner = run(simulated(endpoint(said("Pears?"))), ["Apples?", "Pears."], max_steps=1)
    completion = runner.completion(trajectory)
    tokens = {0: [], 1: []}
    for token, mask in zip(completion.ids, completion.mask, strict=True):
        tokens[mask].append(token)
    masked, own = map(runner.engine.tokenizer.decode, tokens.values())
    assert own == f"Apples?{END}Pears.{END}" and "Pears?" in masked
    assert trajectory.stop_reason is StopReason.MAX_STEPS and trajectory.render_mismatch is None


def test_the_user_sees_neither_calls_nor_results(endpoint):
    server = endpoint(said("Thank you."))
    turns = [SEARCH, "<tool>{</tool>", "<answer>In Peru.</answer>", "Bye."]
    [trajectory], _ = run(simulated(server, max_turns=1), turns, tools=[lookup])
    [asked] = server.asked(CHAT)
    assert [message["content"] for message in asked["messages"][1:]] == [GREETING, "Hi", "In Peru."]
    assert trajectory.turns[0].replies == user("<result>about Lima</result>")
    assert trajectory.turns[2].replies == user("Thank you.") and trajectory.stop_reason is StopReason.MAX_STEPS


def test_a_request_that_fails_is_sent_again(endpoint):
    server = endpoint((500, {"error": {"message": "busy"}}), None, said("Bye. DONE"))
    [trajectory], _ = run(simulated(server, stop_phrase="DONE"), ["Welcome."])
    assert trajectory.stop_reason is StopReason.ENV_DONE and len(server.asked(CHAT)) == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((500, {"error": {"message": "busy"}}), "did not answer in 1 attempts: InternalServerError: "),
        ((404, {"error": {"message": "no model 'user'"}}), "no model 'user'"),
        ((401, {"error": {"message": f"Incorrect key {KEY}"}}), "Incorrect key ***"),
        (None, "did not answer in 1 attempts: "),
        ("gone", "Connect"),
        ((200, "<html>"), "answered without text"),
        ((200, "{}"), "answered without text"),
        (said(None), "answered without text"),
        (said("<think>They want pe"), "answered without text"),
    ],
)
def test_a_failure_ends_the_conversation_not_the_run(endpoint, answer, reason, monkeypatch, caplog):
    monkeypatch.setenv("USER_KEY", KEY + "\n")
    caplog.set_level(logging.DEBUG)
    server = endpoint(answer)
    if answer == "gone":
        server.stop()
    [trajectory], _ = run(simulated(server, max_retries=0, api_key_env="USER_KEY"), ["Welcome."])
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert trajectory.error.startswith(f"SimulatedUserError: The simulated user 'user' at {server.url}/v1 ")
    assert reason in trajectory.error and KEY not in trajectory.error and "\n" not in trajectory.error
    if answer != "gone":
        assert {name.lower(): value for name, value in server.last_headers.items()}["authorization"] == f"Bearer {KEY}"
    assert KEY not in caplog.text and KEY not in json.dumps(trajectory.to_dict())


def test_a_user_that_hangs_ends_the_conversation(endpoint):
    go = threading.Event()
    server = ScriptedServer(lambda method, path, body: go.wait() and None)
    [trajectory], _ = run(simulated(server, max_retries=0, timeout=0.2), ["Welcome."])
    assert trajectory.stop_reason is StopReason.ENV_ERROR and "did not answer in 1 attempts" in trajectory.error
    [trajectory], _ = run(simulated(server), ["Welcome."], limits=RolloutLimits(rollout_timeout=0.2))
    assert trajectory.stop_reason is StopReason.TIMEOUT
    go.set()
    server.stop()


def test_connections_close_with_the_last_conversation(endpoint):
    partner = simulated(endpoint(said("Go on.")))
    for _ in range(2):
        trajectories, _ = run(partner, ["Welcome."] * 2, [{"goal": "pears"}] * 8 + [{}], max_steps=1)
        reasons = [trajectory.stop_reason for trajectory in trajectories]
        assert reasons == [StopReason.MAX_STEPS] * 8 + [StopReason.ENV_ERROR]
        assert "`goal`" in trajectories[-1].error
        assert partner._client is None and partner._conversations == 0


# What is refused before any work

GIVEN = {"base_url": "http://127.0.0.1:9/v1", "model": "user", "system_prompt": "Talk."}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_url": None}, "`simulated_user` has no `base_url`: it needs base_url, model, system_prompt."),
        ({"base_url": "127.0.0.1:9"}, "`simulated_user: base_url` is '127.0.0.1:9': give a URL such as"),
        ({"modell": "x"}, "`simulated_user` has an unknown key 'modell'; the nearest is 'model'."),
        ({"api_key": "sk"}, "`simulated_user: api_key` would write a key into a file"),
        ({"api_key_env": "NO_SUCH_KEY"}, "`simulated_user: api_key_env` is 'NO_SUCH_KEY', an environment variable"),
        ({"stop_phrase": ""}, "`simulated_user: stop_phrase` is '': string should have at least 1 character."),
        ({"max_turns": 0}, "`simulated_user: max_turns` is 0: input should be greater than or equal to 1."),
        ({"max_turns": True}, "`simulated_user: max_turns` is True: input should be a valid integer."),
        ({"max_retries": -1}, "`simulated_user: max_retries` is -1: input should be greater than or equal to 0."),
        ({"timeout": 0}, "`simulated_user: timeout` is 0: input should be greater than 0."),
        ({"timeout": "soon"}, "`simulated_user: timeout` is 'soon': input should be a valid number."),
        (
            {"request": {"stream": True}},
            "`simulated_user: request` sets `stream`, which is set for it: leave that out.",
        ),
        ({"request": 3}, "`simulated_user: request` is 3: input should be a valid dictionary."),
        ({"system_prompt": "Talk {"}, "`simulated_user: system_prompt` has a brace"),
        ({"system_prompt": "Talk {}"}, "`simulated_user: system_prompt` has braces without the name"),
        ({}, "The simulated user's endpoint http://127.0.0.1:9/v1 cannot be reached (ConnectError: "),
    ],
)
def test_a_wrong_user_is_refused_with_one_sentence(tmp_path, changes, message):
    options = {"simulated_user": GIVEN | changes}
    for given in (options, {"environments": {"shop": options}}):
        with pytest.raises(UserError) as caught:
            build_env(config(tmp_path, **given))
        assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def config(folder, **options):
    return MTGRPOConfig(str(folder), use_cpu=True, bf16=False, **options)


TWO = {"simulated_user": GIVEN, "interaction_config_file": "x.yaml"}
IN_SHOP = {"environments": {"shop": {"interaction_config_file": "x.yaml", "env": "x.Y"}}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"simulated_user": wrong}, "`simulated_user` is ") for wrong in ("text", "[1]", 3)),
        (TWO, "`simulated_user` and `interaction_config_file` both say who answers"),
        ({"simulated_user": GIVEN, "env": "x.Y"}, "`simulated_user` and `env` both say who answers the model"),
        (IN_SHOP, "In `environments: shop`, `interaction_config_file` and `env` both"),
    ],
)
def test_what_is_no_mapping_or_beside_another_is_refused(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        build_env(config(tmp_path, **options))


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(UserError, match=r'needs `openai`, which is not installed: `pip install "mt-grpo\[openai\]"`'):
        SimulatedUser(**GIVEN)


def test_the_key_is_tried_before_the_run(endpoint, tmp_path):
    server = endpoint(said("Hi"), models=(401, {"error": {"message": "no"}}))
    partner = GIVEN | {"base_url": f"{server.url}/v1"}
    with pytest.raises(UserError, match=r"refuses requests without a key \(status 401\): name the environment"):
        build_env(config(tmp_path, simulated_user=partner))


def test_a_column_that_no_row_has_is_refused(endpoint, tmp_path):
    partner = GIVEN | {"base_url": f"{endpoint(said('Hi')).url}/v1", "system_prompt": "You want {gaol}."}
    rows = Dataset.from_list([{"prompt": "Hi", "goal": "pears"}])
    with pytest.raises(UserError, match="names {gaol}, which is no column of the dataset; the nearest is 'goal'"):
        check_env(None, config(tmp_path, simulated_user=json.dumps(partner)), rows)


def test_the_example_of_the_page_works(endpoint, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "simulated_users.md").read_text()
    found = [(kind, block) for kind, block in re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)]
    recipe, several = [yaml.safe_load(block) for kind, block in found if kind == "yaml"]
    [row] = [json.loads(block) for kind, block in found if kind == "json"]
    url = f"{endpoint(said('Pears! DONE')).url}/v1"
    recipe["simulated_user"]["base_url"] = url
    for environment in several["environments"].values():
        environment["simulated_user"]["base_url"] = url
    assert list(check_env(None, config(tmp_path, **several))) == ["patient", "hurried"]
    env = check_env(None, config(tmp_path, **recipe), Dataset.from_list([row]))
    script = ScriptedEngine(build_tokenizer(), lambda session, turn: "Yes." + END)
    [trajectory] = asyncio.run(RolloutRunner(env, script).run([RolloutRequest("Hi", "0", row)], SamplingParams()))
    assert trajectory.turns[0].replies == user("Pears!") and trajectory.stop_reason is StopReason.ENV_DONE
