"""What a script prints of a step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import PrinterCallback, ProgressCallback

from mt_grpo.training.step_log.printed import FewerPrinter, FewerProgress, print_fewer, printed


@pytest.mark.parametrize("name", ["loss", "reward", "rewards/mine/mean", "eval_reward", "eval_hard_reward", "epoch"])
def test_what_people_read_is_printed(name):
    assert printed({name: 1.0}) == {name: 1.0}


@pytest.mark.parametrize("name", ["sampling/ratio/max", "rewards/mine/std", "stops/length", "eval_stops/length"])
def test_the_rest_is_not_printed(name):
    assert not printed({name: 1.0})


def test_what_is_not_printed_stays_in_the_logs(capsys):
    logs = {"reward": 0.5, "stops/length": 0.25, "train_runtime": 3.0}
    FewerPrinter().on_log(None, SimpleNamespace(is_local_process_zero=True), None, logs)
    assert capsys.readouterr().out == "{'reward': '0.5', 'train_runtime': '3'}\n"
    assert len(logs) == 3


def test_printers_of_others_are_left_as_they_are():
    class Own(PrinterCallback):
        pass

    callbacks = [ProgressCallback(), PrinterCallback(), Own()]
    print_fewer(callbacks)
    assert list(map(type, callbacks)) == [FewerProgress, FewerPrinter, Own]
