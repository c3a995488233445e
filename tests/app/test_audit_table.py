"""The table of an audit, and the sentences below it."""

from __future__ import annotations

import io

from rich.console import Console

from mt_grpo.app.rollout import findings, show_audit
from mt_grpo.credit import RewardAudit

GOOD = {**dict.fromkeys(RewardAudit.__dataclass_fields__, 0.5), "causal": True}
NOTHING = {**dict.fromkeys(RewardAudit.__dataclass_fields__), "causal": None}


def record(**keys):
    numbers = {"groups": 4, "conversations": 32, "failed": 0, "groups_without_signal": 0.25, "sign_agreement": None}
    numbers["advice"] = None
    return {**numbers, "rewards": {"good": GOOD}, **keys}


def test_a_good_reward_has_nothing_said_of_it():
    assert findings(record()) == ["1 of 4 groups have no signal: their advantages are 0 at every turn."]


def test_what_stands_out_is_said():
    rewards = {
        "silent": {**NOTHING, "applies": 0.0, "equal_groups": 1.0},
        "equal": {**GOOD, "equal_groups": 1.0},
        "late": {**GOOD, "causal": False},
    }
    advice = "`mt_grpo` leaves 71%"
    lines = findings(record(failed=3, sign_agreement=0.25, rewards=rewards, advice=advice))[1:]
    assert [line.split(",")[0].split(":")[0] for line in lines] == [
        "3 of 32 conversations failed",
        "Turn and outcome advantages point the same way at 25% of the turns that have both.",
        "The reward 'silent' never applied",
        "The reward 'equal' teaches nothing here",
        "The reward 'late' depends on later turns",
        advice,
    ]


def test_the_table_fits_a_narrow_terminal():
    rewards = {"exist_answer_in_search_results": GOOD, "silent\x1b[31m": NOTHING}
    console = Console(file=io.StringIO(), width=80, soft_wrap=True)
    show_audit(record(rewards=rewards), console)
    printed = console.file.getvalue()
    assert "\x1b" not in printed and "follows" in printed
    table = printed.split("- 1 of 4")[0].splitlines()
    assert max(map(len, table)) <= 80 and "50% 0.500   0.500    50%   +0.50   50%    yes" in printed
