"""Several ranks on a CPU: unequal numbers of turns neither deadlock nor change what is learnt."""

import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.utils import DistributedType
from support.forked import run_processes
from support.hosts import ADDRESS, hosts
from support.learnt import SHARDED, assert_the_same_is_learnt, run_ranks
from support.models import CPU_RUN

from mt_grpo.errors import ConfigError
from mt_grpo.runlog import open_run
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training.forward_plan import _sequence_group
from mt_grpo.training.preflight import check_batch_sizes

pytestmark = pytest.mark.slow
SHARE_ROWS = {"SP_SIZE": "2"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process learns of the plain run, and its folder."""
    folder = tmp_path_factory.mktemp("alone")
    return run_ranks(folder, 1), folder


@pytest.mark.parametrize(
    ("ranks", "scenario", "environment"),
    [
        (2, "plain", {}),
        (2, "replay", {}),
        (4, "plain", SHARE_ROWS),
        # layers keep an input for two, and the weights of the first are gathered once more for the second
        (2, "plain", {**SHARDED, **SHARE_ROWS, "LAYERS": "2"}),
        # FSDP and DeepSpeed wrap a model once, with its optimiser: an evaluation must not do it first
        (2, "measured", SHARDED),
    ],
)
def test_ranks_learn_what_one_learns(tmp_path, alone, ranks, scenario, environment):
    one, folder = alone
    replayed = {"REPLAYED": str(folder)} if scenario == "replay" else {}
    found = run_ranks(tmp_path, ranks, scenario, **environment, **replayed)
    assert_the_same_is_learnt(one, found)
    assert found["sharded"] == (SHARDED.items() <= environment.items()) and not one["sharded"]
    if found["sharded"] and scenario == "plain":
        assert found["proven"] == one["proven"] and one["proven"]
        assert "UserWarning" not in tmp_path.with_suffix(".log").read_text()
    if not environment:
        run_log = open_run(tmp_path)
        assert set(run_log.column("rank")) == {0, 1}
        assert all((tmp_path / "rollouts" / name).exists() for name in run_log.column("file"))
    if scenario == "measured":
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary["before"]["questions"] == summary["after"]["questions"] == 6 and summary["steps"] == 3


@pytest.mark.parametrize(
    ("scenario", "environments"),
    [
        # in each forward every rank looks at an image or hears a sound: none waits for gradients of another's tower
        ("images", [{}, SHARDED]),
        ("sounds", [SHARDED]),
        # Qwen3.5 without its tower: the family's layers that see are not looked for
        ("hybrid", [SHARDED]),
        ("adapter", [SHARDED, SHARE_ROWS, {"REENTRANT": "1"}]),
        ("taught", [SHARDED, SHARE_ROWS]),
        ("averaged", [SHARDED]),
    ],
)
def test_ranks_learn_what_one_learns_of_every_model(tmp_path, scenario, environments):
    one = run_ranks(tmp_path / "one", 1, scenario)
    for number, environment in enumerate(environments):
        two = run_ranks(tmp_path / f"{number}", 2, scenario, **environment)
        assert two["sharded"] == (environment == SHARDED)
        assert scenario != "adapter" or any("lm_head.modules_to_save" in name for name in two["weights"])
        assert_the_same_is_learnt(one, two)


def test_ranks_that_sample_ahead_learn_what_one_learns(tmp_path):
    """Whatever takes how long where, and with evaluations while batches are in flight: rows are trained in order."""
    assert_the_same_is_learnt(*(run_ranks(tmp_path / f"{ranks}", ranks, "ahead") for ranks in (1, 2)))
    sessions = [sorted(open_run(tmp_path / ranks).column("session")) for ranks in "12"]
    trained = [[row for row in rows if row.startswith("train")] for rows in sessions]
    assert trained[0] == trained[1] and len(trained[0]) == 24


def test_sharded_ranks_on_two_hosts_learn_what_one_learns(tmp_path, alone):
    """The hosts are network namespaces that share no folder; the first one has the records of both."""
    folder = tmp_path / "run"
    group = {"MASTER_ADDR": ADDRESS.format(1), "MASTER_PORT": "29500", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    group |= {"LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": os.pathsep.join(sys.path), **SHARDED}
    with hosts(2, folder, tmp_path / "private") as two:
        logs = [tmp_path / f"host{rank}.log" for rank in range(2)]
        command = ["-m", "support.ranks", str(folder), "2", "plain"]
        running = [two.start(rank, command, logs[rank], **group, RANK=str(rank)) for rank in range(2)]
        assert [process.wait(300) for process in running] == [0, 0], logs[0].read_text()[-3000:]
    first, second = (tmp_path / "private" / name for name in "01")
    found = torch.load(first / "result.pt")
    assert found["sharded"] and not list(second.glob("result.pt"))
    assert_the_same_is_learnt(alone[0], found)
    assert set(open_run(first).column("rank")) == {0, 1}


def test_all_ranks_train_padded_rows_where_trees_are_wrong(tmp_path):
    assert run_ranks(tmp_path, 2, "wrong_trees", **SHARDED) == {"gave up": True, "forward": "padded"}


def test_bfloat16_sharding_rounds_what_is_sent_not_learnt(tmp_path):
    """Neither log-probs nor the sum of gradients."""
    two = run_ranks(tmp_path, 2, "bf16", **SHARDED)
    assert two["sharded"] and two["dtype"] == torch.float32 and not two["rounded"]
    assert {tensor.dtype for tensor in two["sent"].values()} == {torch.bfloat16}


def test_rows_move_between_ranks_so_that_work_is_even(tmp_path):
    one, two = run_ranks(tmp_path / "1", 1, "steps"), run_ranks(tmp_path / "2", 2, "steps")
    for found in (two, run_ranks(tmp_path / "shared", 2, "steps", **SHARE_ROWS)):
        assert_the_same_is_learnt(one, found)
    assert sum(two["work"]) == sum(one["work"])
    assert one["sampled"] == two["sampled"] == 8 + 2 * 4  # the second rank's group had no signal, two times
    assert one["audit"] == two["audit"] and one["audit"]["groups"] == 6
    saved = {path.name for path in (tmp_path / "2" / "checkpoint-3").iterdir()}
    assert saved >= {"model.safetensors", "rollouts-rank0.pt", "rollouts-rank1.pt"}
    first, second = two["work"].view(2, 2).sum(dim=1).tolist()  # a rank's micro-batches
    assert max(first, second) < 1.05 * min(first, second)


def test_rows_that_only_fill_up_the_last_batch_are_not_counted(tmp_path):
    def counted(name):
        kind = name.split("/")[0].removeprefix("eval_")
        means = kind in ("rewards", "completions") and "/mean" in name
        return means or kind in ("loss", "stop", "turns", "tools", "tokens", "reward") or kind.startswith("turn_")

    one, two = run_ranks(tmp_path / "1", 1, "uneven"), run_ranks(tmp_path / "2", 2, "uneven")
    for single, shared in zip(one["evaluations"], two["evaluations"], strict=True):
        assert single.keys() == shared.keys()
        names = list(filter(counted, single))
        assert [shared[name] for name in names] == pytest.approx([single[name] for name in names], rel=1e-4)
        assert sum(value for name, value in shared.items() if name.startswith("eval_stop/")) == pytest.approx(1)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in "12"]
    assert [summary[moment]["questions"] for summary in summaries for moment in ("before", "after")] == [5] * 4
    assert summaries[0]["before"] == pytest.approx(summaries[1]["before"])
    assert open_run(tmp_path / "2").column("mode").count("eval") == 4 * 10


@pytest.mark.parametrize("scenario", ["branches", "turns"])
def test_one_kind_of_reward_is_enough_on_several_ranks(tmp_path, scenario):
    """NCCL's branch of accelerate gathers no tensor without elements; conversations with outcomes branch."""
    one, two = run_ranks(tmp_path / "1", 1, scenario), run_ranks(tmp_path / "2", 2, scenario, GATHER_AS_NCCL="1")
    torch.testing.assert_close(torch.tensor(one["learnt"]), torch.tensor(two["learnt"]), rtol=1e-4, atol=1e-6)
    assert one["turns"] == two["turns"] and one["credit"]["branch_to_go"].any()
    torch.testing.assert_close(one["credit"]["branch_to_go"], two["credit"]["branch_to_go"], rtol=1e-4, atol=1e-5)


def test_a_loss_that_is_not_finite_on_one_rank_ends_both(tmp_path):
    two = run_ranks(tmp_path, 2, "spoilt", **SHARDED)
    assert two["sharded"] and not two["learnt"]


ENDS = {
    "weights_differ": ("ConfigError", "ConfigError"),
    "adapters_differ": ("ConfigError", "ConfigError"),
    "engine_fails": ("RankError", "Local"),
    "memory_ends": ("RankError", "MemoryError"),
    "on_finish_raises": ("RankError", "OSError"),
    "writer_fails": ("RunLogError", "RunLogError"),
    "reward_raises": ("RewardError", "RewardError"),
    "reward_exits": ("RankError", "SystemExit"),
    "both_fail_differently": ("RewardError", "RewardError"),
    "env_cannot_begin": ("trained", "trained"),
    "no_conversation_is_left": ("trained", "trained"),
    "template_of_judge_refuses": ("RewardError", "RewardError"),
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """How each run of `support.ranks_failures` ended for each rank."""
    folder = tmp_path_factory.mktemp("ends")
    run_processes(["-m", "support.ranks_failures", str(folder)], 2, folder / "log", {})
    return [json.loads((folder / f"ends-{rank}.json").read_text()) for rank in range(2)]


def test_a_failure_of_one_rank_ends_all_with_its_reason(ends):
    first, second = ends
    assert {name: (first[name][0], second[name][0]) for name in ENDS} == ENDS
    for name, (kind, _) in ENDS.items():
        if kind == "RankError":  # with the traceback of the one that failed
            assert first[name][1].startswith("Process 1 failed:\nTraceback") and second[name][1] in first[name][1]
        else:
            assert first[name][1] == second[name][1]
    for name in ("weights_differ", "adapters_differ"):
        assert "begin with different weights: of process 1 on" in first[name][1]
    assert "a bug in the engine (7)" in first["engine_fails"][1] and "engines/__init__.py" in first["engine_fails"][1]


@pytest.mark.parametrize("environment", [{}, SHARDED], ids=["whole", "sharded"])
def test_a_synced_reference_is_restored_on_every_rank(tmp_path, environment):
    assert run_ranks(tmp_path, 2, "reference", **environment)["sharded"] == bool(environment)
    assert (tmp_path / "checkpoint-3" / "reference.tensors").exists()


def test_a_host_takes_a_checkpoint_that_was_replaced(tmp_path):
    """
    Its copy has the size of the new one. Nothing of another run's shards stays, and no step is recorded twice. A
    signal to the second host, which has no copy of the last one, ends both. A first host with a part of a checkpoint
    takes nothing from the one that has it whole.
    """
    run_processes(["-m", "support.ranks_hosts", str(tmp_path)], 2, tmp_path / "log", {})
    first, second = (torch.load(tmp_path / f"result-{rank}.pt") for rank in range(2))
    for name, weight in first["weights"].items():
        assert weight.equal(second["weights"][name]), name
    files = [sorted(each[name]) for each in (first, second) for name in ("copied", "completed")]
    assert files == [files[0]] * 4
    assert first["logged"] == [(step, rank) for step in range(3) for rank in (0,) * 4 + (1,) * 4]


# `sp_size`: what it cannot train is refused in one sentence, before any work

SAID = {
    "heads": "Qwen3ForCausalLM has 3 attention heads, which 2 processes cannot share equally: set `sp_size` to 3, or",
    "attention of its own": "BloomForCausalLM computes its attention itself, so several processes cannot compute its",
    "balanced experts": "`sp_size: 2` has no loss that balances experts",
    "wrong over trees": "Qwen3ForCausalLM scores packed trees",
    "three": "`sp_size: 3` does not divide 2 processes: start a multiple of it (`--num_processes`), or leave it out.",
}


def test_models_that_cannot_be_shared_are_refused_on_every_rank(ends):
    for end in ends:
        said = {name: words for name, (kind, words) in end.items() if kind == "ConfigError" and name not in ENDS}
        assert {name: words[: len(SAID[name])] for name, words in said.items()} == SAID
        assert "shares packed trees among processes: leave `sp_size` out" in said["wrong over trees"]


def test_one_process_cannot_train_for_two(tmp_path):
    args = MTGRPOConfig(str(tmp_path), **CPU_RUN, sp_size=2)  # it may sample
    with pytest.raises(ConfigError, match="`sp_size: 2` does not divide 1 process: start a multiple of it"):
        check_batch_sizes(args)


@pytest.mark.parametrize(
    ("launched", "message"),
    [
        ({"distributed_type": DistributedType.DEEPSPEED}, "which DeepSpeed does not: shard with FSDP2"),
        ({"distributed_type": DistributedType.FSDP}, "which FSDP 1 does not: shard with FSDP2"),
        ({"parallelism_config": ParallelismConfig(sp_size=2)}, "leave it out, and set `sp_size` in the recipe"),
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, "leave it out, and set `sp_size` in the recipe"),
    ],
)
def test_other_ways_to_spread_a_model_are_refused(launched, message):
    accelerator = {"num_processes": 2, "is_fsdp2": False, "parallelism_config": None, "distributed_type": None}
    trainer = SimpleNamespace(args=SimpleNamespace(sp_size=2), accelerator=SimpleNamespace(**accelerator | launched))
    with pytest.raises(ConfigError, match=message):
        _sequence_group(trainer)
