"""A person asks an agent in the environment of its training."""

import io

import pytest
import yaml

from mt_grpo.app import serve
from mt_grpo.rollout import ScriptedEngine

ADDS = '<tool>{"name": "calculator", "args": {"expression": "2 + 3"}}</tool>'


@pytest.fixture
def talks(recipe, model_folder, tokenizer, prints, monkeypatch, tmp_path):
    """What is shown to a person who types lines to an agent that writes a script; and the engine."""

    def talk(typed, script, *options, **keys):
        recipe(**{"max_turn_length": 100, **keys})
        run = tmp_path / "run"
        run.mkdir(exist_ok=True)
        (tmp_path / "recipe.yaml").rename(run / "config.yaml")
        for file in model_folder.iterdir():
            (run / file.name).write_bytes(file.read_bytes())
        engine = ScriptedEngine(tokenizer, script)
        monkeypatch.setattr(serve, "_local", lambda *_: engine)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed.encode("latin-1")), "utf-8"))
        return prints("chat", run, *options), engine

    return talk


def test_calls_and_results_are_shown_as_they_happen(talks):
    script = [f"<reasoning>add</reasoning>{ADDS}", "<answer>five</answer>"]
    shown, engine = talks("\nWhat is 2 + 3\xe9\n", script, system_prompt="Add things up.")
    assert shown.splitlines() == ["add", "→ calculator(expression='2 + 3')", "← 5", "five"]
    first = engine.tokenizer.decode(engine.requests[0][1])
    assert "Add things up." in first and "What is 2 + 3" in first


def test_a_question_goes_on_and_reset_begins_anew(talks):
    script = [ADDS, "<answer>five</answer>", ADDS, "<answer>six</answer>"]
    shown, engine = talks("one\ntwo\n/reset\nthree\n/quit\nfour\n", script, max_env_steps=1)
    contexts = [engine.tokenizer.decode(context) for _, context, _ in engine.requests]
    assert [("one" in each, "two" in each, "three" in each) for each in contexts] == [
        *[(True, False, False)] * 2,
        *[(True, True, False)] * 2,  # and may take as many steps again
        *[(False, False, True)] * 2,
    ]
    (_, before, sample), (_, after, _) = engine.requests[1:3]
    assert after[: len(before) + len(sample.ids)] == before + sample.ids  # nothing is encoded again
    assert shown.count("five") == 2 and shown.count("six") == 1


@pytest.mark.parametrize(
    ("script", "keys", "words"),
    [
        ([ADDS, ADDS], {"max_env_steps": 1}, "has not answered in as many steps"),
        (["<reasoning>on and on and on and on"], {"max_turn_length": 4}, "cut at the length"),
        ([ValueError("broken")], {}, None),
    ],
)
def test_a_conversation_that_ends_says_why_and_another_begins(talks, script, keys, words):
    if words is None:
        with pytest.raises(ValueError, match="broken"):
            talks("one\n", script, **keys)
        return
    shown, engine = talks("one\ntwo\n", script, **keys)
    assert shown.count(words) == 2 and len({session for session, *_ in engine.requests}) == 2


def test_a_turn_that_could_not_be_read_is_told(talks):
    shown, _ = talks("one\n", ["<tool>no</tool>", "<answer>x</answer>"])
    assert "← the tool call is not valid JSON" in shown


def test_a_person_stands_where_a_user_was_simulated(talks):
    user = {"base_url": "http://127.0.0.1:9/v1", "model": "it", "system_prompt": "You want {goal}."}
    script = ["Which two?", ADDS, "It is five."]
    shown, engine = talks("Add\n2 and 3\n", script, simulated_user=user, call_protocol="tags")
    assert shown.splitlines() == ["Which two?", "→ calculator(expression='2 + 3')", "← 5", "It is five."]
    assert len({session for session, *_ in engine.requests}) == 1


@pytest.mark.parametrize(
    ("keys", "options", "words"),
    [
        ({"multi_turn_scheduler": "gym_scheduler", "call_protocol": None, "tools": None}, (), "asks by itself"),
        ({"environments": {"a": {}, "b": {}}}, (), "several environments, a, b: leave one"),
        ({}, ("--model_name_or_path", "embedded"), "takes the model in that folder"),
        ({}, ("--checkpoint", "3"), "has no checkpoint 3"),
        ({}, ("--server", "http://127.0.0.1:9"), "There is no vLLM server at http://127.0.0.1:9"),
    ],
)
def test_what_a_person_cannot_ask_is_refused(talks, refused, monkeypatch, tmp_path, keys, options, words):
    monkeypatch.setattr(serve, "chat", lambda *_: 0)
    talks("", [], **keys)
    monkeypatch.undo()
    assert words in refused("chat", tmp_path / "run", *options)


def test_a_folder_without_a_recipe_is_no_run(refused, tmp_path):
    assert "has no `config.yaml`" in refused("chat", tmp_path)
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({"model_name_or_path": "embedded", "dataset_name": "embedded"})
    )
    assert "There is no trained model in" in refused("chat", tmp_path)
    assert "write `mt-grpo chat RUN --checkpoint N`" in refused("chat", "recipes/quickstart.yaml", "--checkpoint", "2")
