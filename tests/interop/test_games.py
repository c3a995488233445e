"""Games of TextArena and tasks of reasoning-gym, played for real; `make interop-games` installs them."""

import random
import re
from importlib.util import find_spec

import pytest
from support.conversations import play

from mt_grpo.data import DatasetError, load_rows
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.errors import ConfigError
from mt_grpo.integrations.textarena import textarena_game
from mt_grpo.rewards import reasoning_gym_reward
from mt_grpo.trajectory import StopReason


def needs(package):
    reason = f"{package} is not installed: run `make interop-games`"
    return pytest.mark.skipif(find_spec(package) is None, reason=reason)


def played(env, turns, rows):
    return play(env, turns, rows, prompt="")[0]


@needs("textarena")
class TestTextArena:
    def test_a_game_is_won_and_lost(self):
        """Towers of three disks: the seven moves that solve it, and a player who only makes invalid ones."""
        solution = ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"]
        env = textarena_game("TowerOfHanoi-v0", max_turns=12)
        [won] = played(env, solution, [{"seed": 1}])
        assert (won.stop_reason, won.env_rewards, len(won.turns)) == (StopReason.ENV_DONE, {"return": 1.0}, 7)
        assert won.turns[-1].reward == 1.0 and "A: [3, 2]" in won.turns[0].replies[0]["content"]
        assert "Tower of Hanoi" in won.prompt[0]["content"]
        [lost] = played(env, ["I pass."] * 12, [{"seed": 1}])
        assert lost.env_rewards["return"] < 1.0 and "invalid move" in lost.turns[0].replies[0]["content"]

    def test_a_game_against_an_opponent(self):
        env = textarena_game("TicTacToe-v0", opponent=lambda seen: f"[{re.findall(r'[678]', seen)[-1]}]", max_turns=5)
        [game] = played(env, [f"[{turn}]" for turn in range(5)], [{"seed": 1}])
        assert (game.stop_reason, game.env_rewards) == (StopReason.ENV_DONE, {"return": 1.0})
        assert "X" in game.turns[0].replies[0]["content"]

    def test_members_of_a_group_see_the_same_start(self):
        """Games draw from the global generator, which is left as it was."""
        random.seed(3)
        before = random.getstate()
        env = textarena_game("Blackjack-v0", max_turns=4)
        games = played(env, ["[Stand]"] * 4, [{"seed": seed} for seed in (1, 1, 1, 2)])
        starts = [game.prompt[0]["content"] for game in games]
        assert starts[0] == starts[1] == starts[2] != starts[3]
        replies = [[turn.replies for turn in game.turns] for game in games]
        assert replies[0] == replies[1] == replies[2]
        assert random.getstate() == before

    def test_an_unknown_game_is_refused(self):
        with pytest.raises(ConfigError, match="no game 'TowerOfHano-v0'.*'TowerOfHanoi-v0'"):
            textarena_game("TowerOfHano-v0")


@needs("reasoning_gym")
class TestReasoningGym:
    @pytest.mark.parametrize("task", ["leg_counting", "basic_arithmetic", "countdown"])
    def test_right_answers_earn_and_wrong_ones_do_not(self, task):
        rows = [dict(row) for row in load_rows(f"reasoning_gym:{task}", "train[:4]")]
        for right in (True, False):
            env = MultiTurnToolEnv(protocol="learnt_tags", max_steps=0)
            answers = [[f"<answer>{row['answer'] if right else '?'}</answer>"] for row in rows]
            ended = played(env, answers, rows)
            scores = [reasoning_gym_reward.score(one, **one.row) for one in ended]
            assert scores == [1.0] * 4 if right else max(scores) < 0.5

    def test_splits_differ_and_options_count(self):
        splits = ("train", "test")
        train, test = (load_rows("reasoning_gym:leg_counting", split, config="{size: 3}") for split in splits)
        assert len(train) == len(test) == 3 and train[0]["prompt"] != test[0]["prompt"]

    @pytest.mark.parametrize(
        ("name", "split", "config", "problem"),
        [
            ("leg_countin", "train", None, "no task 'leg_countin'; the nearest is 'leg_counting'"),
            ("leg_counting", "dev", None, "no split 'dev': they have train, validation, test"),
            ("leg_counting", "train", "{legs: 3}", "does not take its options"),
            ("leg_counting", "train", "legs", "`dataset_config` is 'legs': give the options"),
        ],
    )
    def test_what_does_not_exist_is_refused(self, name, split, config, problem):
        with pytest.raises(DatasetError, match=problem):
            load_rows(f"reasoning_gym:{name}", split, config=config)
