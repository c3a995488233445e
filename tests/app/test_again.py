"""`mt-grpo rollout --again`: a recorded conversation goes on from one of its turns."""

import json

import pytest

from mt_grpo.cli import main
from mt_grpo.envs import Env, Outcome
from mt_grpo.runlog import open_run
from mt_grpo.token_tree import TokenTree


class Echo(Env):
    """Says what it was told, for three turns of four tokens."""

    asks, says = "", "You said"

    async def run(self, policy, row):
        messages = [{"role": "user", "content": self.asks + row["prompt"][-1]["content"]}]
        for _ in range(3):
            turn = await policy.reply(messages, max_tokens=4)
            messages += [turn.message, {"role": "user", "content": f"{self.says}: {turn.text}"}]
        return Outcome()

    async def close(self):
        pass


class Asks(Echo):
    """Asks something else."""

    asks = "Listen. "


class Says(Echo):
    """Says something else."""

    says = "You wrote"


SECOND = "eval-000000-000000-000002"  # of the second row


@pytest.fixture
def recorded(recipe, prints, tmp_path):
    """The words of a recipe, and the folder with two conversations of each of two of its rows."""

    def words(env="Echo"):
        without = dict.fromkeys(("tools", "turn_reward_funcs", "call_protocol"))
        return recipe(env=f"test_again.{env}", **without)

    prints("rollout", *words(), "--num_prompts", "2", "--save", tmp_path / "first")
    return words, tmp_path / "first"


def actions(run):
    trees = [TokenTree.from_dict(each["tree"]) for each in run.trajectories()]
    return [tree.actions() for tree in trees]


def test_a_conversation_goes_on_from_a_turn(recorded, prints, tmp_path):
    words, folder = recorded
    command = "rollout", "--again", folder, "--trust", "--conversation", SECOND, "--turn", "3"
    said = prints(*command, "--num_generations", "3", "--save", tmp_path / "again")
    assert said.count("─ conversation ") == 3 and said.count("What is 5 of Peru") == 3
    before = actions(open_run(folder))[int(SECOND[-6:])]
    run = open_run(tmp_path / "again")
    after = actions(run)
    assert all(each[:2] == before[:2] for each in after)
    assert len({json.dumps(each[2]) for each in [before, *after]}) == 4
    told = next(run.trajectories())["info"]
    assert told == {"again": str(folder), "conversation": SECOND, "turn": 3}


@pytest.mark.parametrize(
    ("env", "said"),
    [("Asks", "before turn 1 it goes on with 'Listen"), ("Says", "before turn 2 it goes on with")],
)
def test_what_is_not_as_recorded_is_one_sentence(recorded, capsys, env, said):
    words, folder = recorded
    command = ["rollout", *words(env), "--again", str(folder), "--conversation", SECOND, "--turn", "3"]
    capsys.readouterr()
    assert main(command) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert f"engine_error: The conversation {SECOND} cannot be taken again: {said}" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--again RUN", "add `--conversation NAME --turn N`"),
        ("--turn 2", "`--conversation` and `--turn` say of which run"),
        ("--again RUN --conversation NAME --turn 2 --num_prompts 3", "leave `--num_prompts`, `--model`"),
        ("--again nowhere --conversation NAME --turn 2", "There is no folder nowhere: name the `output_dir`"),
    ],
)
def test_half_of_the_options_is_refused(recipe, refused, words, said):
    assert said in refused("rollout", *recipe(), *words.split())


def test_what_is_not_there_cannot_be_taken_again(recorded, refused):
    recipe, folder = recorded
    for words, said in [
        ("eval --turn 2", "has no conversation 'eval'"),
        (f"{SECOND} --turn 4", f"The conversation {SECOND} has 3 turns: give one of them"),
        (f"{SECOND} --turn 2 --dataset_test_split train[6:]", "The recipe has no row with the columns of"),
    ]:
        assert said in refused("rollout", *recipe(), "--again", folder, "--conversation", *words.split())
