"""`mt-grpo credit`: what it refuses before any work, and what it says of conversations."""

import io
import json
import re
import shutil
import threading
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from support.decision_processes import PROCESSES
from support.exact_gradients import Paths, measure
from support.images import build_processor, build_vision_model
from support.models import build_model, build_tokenizer
from support.recipes import ROOT
from support.runs import write_run

from mt_grpo.advisor import _choose
from mt_grpo.advisor.compare import ALL, judge_rules
from mt_grpo.advisor.measure import Found, _rules_of, _with_batch_scale, compare, compute
from mt_grpo.advisor.measure import measure as measure_run
from mt_grpo.advisor.report import _advice, as_json, show
from mt_grpo.cli import main
from mt_grpo.credit import RewardBatch, rule_label
from mt_grpo.errors import UserError
from mt_grpo.forward import SIZE
from mt_grpo.options.values import DEFAULT_RULE
from mt_grpo.runlog import files, open_run
from mt_grpo.token_tree import TokenTree
from mt_grpo.trajectory import Trajectory, Turn


def test_a_log_says_what_takes_long(monkeypatch):
    said = threading.Event()

    def work(chosen, tell, note):
        note("loading the model")
        assert said.wait(60)

    monkeypatch.setattr(files, "QUIET", 0.01)
    monkeypatch.setattr("mt_grpo.advisor.measure._measure", work)
    monkeypatch.setattr("sys.stderr", io.StringIO())  # no terminal, which has a bar
    measure_run(None, lambda words: words == "loading the model" and said.set())
    assert said.is_set()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("credit") / "run", steps=2, groups=3)


@pytest.fixture
def folder(written, tmp_path):
    shutil.copytree(written, tmp_path / "run")
    return tmp_path / "run"


def say(folder, **about):
    """Changes what the index says of the run."""
    index = folder / "rollouts" / "index.jsonl"
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    lines = [{**line, **about} if line["kind"] == "run" else line for line in lines]
    for line in lines:
        line.pop("crc", None)
    index.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


NOT_ITS_MODEL = "is not the one that sampled these conversations"


@pytest.mark.parametrize(
    ("arguments", "config", "words"),
    [
        ("", None, ["takes one folder"]),
        ("a b", None, ["takes one folder"]),
        ("--stepp 3", None, ["the nearest is '--step'"]),
        ("x --step", None, ["needs a value"]),
        ("x --step -1", None, ["'-1' is none"]),
        ("x --max_groups 1", None, ["from 2 on"]),
        ("nowhere", None, ["There is no folder nowhere"]),
        ("RUN --step 7", None, ["has no conversations of step 7: it has those of steps 0 to 2"]),
        ("RUN --step 2", None, ["no groups of several conversations at step 2"]),
        ("RUN --step 1", None, ["has no checkpoint of (it has those of 9)", "--model_name_or_path"]),
        ("RUN", "branch_at: 1", ["branch (`branch_at: 1`)"]),
        ("RUN", "temperature: warm", ["`temperature` in"]),
        ("RUN", "model_name_or_path: ./gone", ["The model './gone' cannot be loaded: there is no such folder"]),
        ("RUN", None, [NOT_ITS_MODEL, "--model_name_or_path"]),  # the log-probs of this run are made up
    ],
)
def test_what_cannot_be_compared_is_refused(folder, refused, arguments, config, words):
    for name in ("checkpoint-9", "checkpoint-best"):
        (folder / name).mkdir()
    if config is not None:
        (folder / "config.yaml").write_text(f"{config}\n")
    said = refused("credit", *arguments.replace("RUN", str(folder)).split())
    assert all(each in said for each in words)


def test_help_needs_no_folder(prints):
    assert "--max_groups N" in prints("credit", "--help")


def test_conversations_of_another_kind_are_refused(folder, tmp_path, refused):
    assert "has one whole group" in refused("credit", write_run(tmp_path / "one", steps=1, groups=1))
    for model in (build_model(build_tokenizer()), build_vision_model(build_processor().tokenizer)):
        model.save_pretrained(tmp_path / "other")
        said = refused("credit", folder, "--model_name_or_path", tmp_path / "other")
        assert f"{NOT_ITS_MODEL}: it has " in said and "they have the token" in said
    say(folder, rewards=[])
    assert "does not say which rewards" in refused("credit", folder)


def test_what_shows_images_is_refused_before_a_model_is_loaded():
    tree = TokenTree()
    tree.add_turn([-4], [1], [0.0])
    run = SimpleNamespace(about={"rewards": []}, trajectories=lambda rows: [Trajectory([], tree=tree).to_dict()])
    with pytest.raises(UserError, match="show images or sounds, which credit rules are not compared on"):
        measure_run(SimpleNamespace(run=run, rows=[], options={}), print)


def test_whole_groups_of_the_first_step_are_chosen(folder):
    chosen = _choose(open_run(folder), most=2)
    assert (chosen.mode, chosen.step, chosen.group_size, chosen.model) == ("train", 0, 4, "embedded")
    assert [(row["group"], row["member"]) for row in chosen.rows] == [(g, m) for g in (0, 1) for m in range(4)]
    assert chosen.groups_per_step == 2.0
    (folder / "config.yaml").write_text("per_device_train_batch_size: 16\nnum_generations: 4\n")
    chosen = _choose(open_run(folder), most=2)
    assert (chosen.groups_per_step, chosen.options["advantage_estimator"]) == (4.0, "mt_grpo")  # a recipe without one


def test_a_run_of_python_has_its_options_in_the_index(folder, refused):
    say(folder, options={"temperature": 0.5, "loss_type": "grpo", "turn_advantage_coef": 2, "report_to": []})
    options = _choose(open_run(folder)).options
    assert [options[name] for name in ("temperature", "loss_type", "turn_advantage_coef")] == [0.5, "grpo", 2]
    assert (options["advantage_estimator"], options["seed"]) == ("mt_grpo", 42)
    say(folder, options={"temperature": "warm"})
    assert "`temperature` in the index of" in refused("credit", folder)


def test_more_is_sampled_by_a_recipe_that_is_there(folder, refused):
    say(folder, options={"branch_at": 1})
    assert "`mt-grpo rollout RECIPE.yaml --num_prompts 32 " in refused("credit", folder)
    (folder / "config.yaml").write_text("branch_at: 1\n")
    assert f"`mt-grpo rollout {folder / 'config.yaml'} --num_prompts 32 " in refused("credit", folder)


def drawn(process, parameters, size=4):
    """A process, and 300 groups of it."""
    paths = Paths.of(process, parameters)
    return paths, paths.draw(300, size)


@pytest.mark.parametrize("name", ["one_search", "late"])
def test_rules_are_compared_as_enumeration_has_them(name):
    """All registered rules on sampled groups, with the exact gradient of each turn in place of a projected one."""
    paths, rows = drawn(*PROCESSES[name])
    own, rules = _rules_of({"name": "gtpo", "gamma": 0.7})
    assert own == "gtpo (gamma 0.7)" and {"mt_grpo", "gtpo (gamma 0.5)", own} <= set(rules)
    judged, left_out = compare(paths.gradients[rows.flatten()], paths.batch(rows), rules, 8)
    found = judged.items[ALL]
    assert left_out == {"branch_to_go": "the conversations do not branch"} and found.known
    for label in ("mt_grpo", "reward_to_go", "grpo_mr", "grpo_or", own):
        exact = measure(rules[label], PROCESSES[name][0], group_size=4, parameters=PROCESSES[name][1])
        direction = found.directions[label]
        if direction is None:
            assert exact.mean.norm() < 1e-12
        else:
            assert direction.cosine.low - 0.02 <= exact.cosine <= direction.cosine.high + 0.02


def test_a_length_in_the_loss_bends_rules_not_the_reference():
    paths, rows = drawn(*PROCESSES["late"])
    shares = 1.0 / paths.turn_mask[rows.flatten()].sum(dim=1).double() ** 2
    options = {"rules": {"leave_one_out": "leave_one_out"}, "groups_per_step": 8}
    batch, gradients = paths.batch(rows), paths.gradients[rows.flatten()]
    plain, bent = (compare(gradients, batch, weights=weights, **options)[0].items[ALL] for weights in (None, shares))
    assert plain.directions["leave_one_out"].cosine.value == pytest.approx(1.0)
    assert bent.directions["leave_one_out"].cosine.value < 0.9999


def key_decision(play):
    """The first turn decides the outcome; five more are paid, each for a skill of its own."""
    right = play.decide(0)
    play.turn(0.0, result=True)
    for turn in range(1, 6):
        play.turn(0.6 if play.decide(turn) else 0.0, result=True)
    return float(right)


def paid_calls(play):
    """Up to four calls, of which each is paid a little and makes the answer right less often."""
    for calls in range(4):
        if not play.decide(calls):
            break
        play.turn(0.02, result=True)
    else:
        calls = 4
    right = play.chance(1 - calls / 4) if calls < 4 else False
    play.turn()
    return float(right)


def coin(play):
    """Six turns earn a little for a skill each, and the outcome is a coin."""
    for turn in range(6):
        play.turn(0.01 if play.decide(turn) else 0.0, result=True)
    return float(play.chance(0.5))


RULES = ["leave_one_out", {"name": "gtpo", "gamma": 0.5}, "lambda_to_go", {"name": "lambda_to_go", "scales": "one"}]


def judged(process, parameters):
    paths, rows = drawn(process, parameters, 8)
    rules = {rule_label(rule): rule for rule in RULES}
    return compare(paths.gradients[rows.flatten()], paths.batch(rows), rules, 8, scale_rewards="group")[0]


def test_a_lost_outcome_is_not_hidden_behind_easy_turn_rewards():
    """The gradient of all rewards is mostly that of the five paid turns, which the short discount follows well."""
    found = judged(key_decision, (-0.5,) * 6)
    assert set(found.told) == {ALL, "outcome"} and not found.silent and not found.opposed
    short = "gtpo (gamma 0.5)"
    assert found.items[ALL].directions[short].cosine.value > 0.8
    assert found.worst(short) == "outcome" and found.scores[short][0] < 0.3
    assert found.best != short and found.behind(short, found.best)


def test_the_default_is_known_by_either_name():
    paths, rows = drawn(paid_calls, (0.5,) * 4, 8)
    one = {**DEFAULT_RULE, "scales": "one"}
    rules = {
        "lam 1": {**DEFAULT_RULE, "lam": 1.0},
        "default": DEFAULT_RULE,
        "one": one,
        "one, batch": one,
        "batch": "lambda_to_go",
    }
    scales = {"one, batch": "batch", "batch": "batch"}
    found, _ = compare(paths.gradients[rows.flatten()], paths.batch(rows), rules, 8, scales=scales)
    assert found.preferred == ("default", "one, batch", "lam 1") and found.best == "default"


def late_fine(play):
    """A shortcut is paid at once, and fined when nine more turns are over."""
    short = play.decide(0)
    play.turn(0.2 if short else 0.0, result=True)
    for _ in range(8):
        play.turn(0.0, result=True)
    play.turn(-0.6 if short else 0.0, result=True)
    return 0.0


def test_a_fine_that_comes_late_needs_no_lambda():
    """λ .8 leaves .13 of it, so that the default goes for the shortcut."""
    paths, rows = drawn(late_fine, (0.0,), 8)
    own, rules = _rules_of(DEFAULT_RULE)
    rules = {label: rule for label, rule in rules.items() if not label.startswith("state_baseline")}
    found, _ = compare(paths.gradients[rows.flatten()], paths.batch(rows), rules, 8, scale_rewards="group")
    assert found.scores[own][0] < 0 and found.best == "lambda_to_go (lam 1.0, scales batch)"


def jackpot(play):
    """A turn is paid for what keeps the conversation from an outcome that is worth more than all of them."""
    right = True
    for turn in range(5):
        well = play.decide(turn)
        right = right and well
        play.turn(0.0 if well else 0.1, result=True)
    return 10.0 * float(right)


def test_turn_rewards_name_no_rule_where_the_outcome_is_rare():
    paths = Paths.of(jackpot, (-0.7,) * 5)
    rows = paths.draw(48, 8, 1)
    rules = {rule_label(rule): rule for rule in RULES}
    found, _ = compare(paths.gradients[rows.flatten()], paths.batch(rows), rules, 8, scale_rewards="group")
    assert list(found.told) == ["turn reward 1"] and found.rare == [ALL, "outcome"] and not found.known


def test_rewards_count_as_the_run_scales_them():
    found = judged(paid_calls, (0.5,) * 4)
    assert found.worst("lambda_to_go") == ALL and found.best != "lambda_to_go"
    assert found.behind("lambda_to_go", found.best)


# From a rollout to advice


@pytest.fixture
def found_on(folder):
    """What the command would have found on gradients that are made up."""

    def make(rules, truths, own, kept=None, batch=None, scales=None, preferred=()):
        judged = judge_rules(rules, truths, 4, kept or {}, preferred, draws=200)
        names = dict.fromkeys(rules, "leave_one_out")
        return Found(_choose(open_run(folder)), own, batch, None, names, scales or {}, judged, {}, 28, 1.0, 0.0)

    return make


def test_what_groups_do_not_tell_is_no_number(found_on, capsys):
    """No length is told from 0, and no rule is shown to go along the mean of few noisy groups."""
    generator = torch.Generator().manual_seed(4)
    truth = torch.eye(64)[0]
    noisy = 0.1 * truth + 0.5 * torch.randn(7, 64, generator=generator)
    rules = {"quiet": truth + 0.05 * torch.randn(7, 64, generator=generator), "noisy": noisy}
    found = found_on(rules, {ALL: noisy}, "noisy")
    printed = as_json(found)
    quiet = printed["rules"]["quiet"]
    assert printed["known"] is False and printed["best"] is None and not quiet["behind_best"]
    assert quiet["cosine"] == quiet["step"] == {"value": None, "low": None, "high": None}
    show(found)
    shown = capsys.readouterr().out
    assert re.search(r"\nquiet +not told +\d.* +not told *\n", shown) and "[-1.00, 1.00]" not in shown
    assert "so they tell no rule from another: sample more" in shown


def estimates(first, noise=0.2, seed=0):
    """Noisy estimates of a gradient that begins with these numbers, of 40 groups."""
    draws = torch.Generator().manual_seed(seed)
    return torch.tensor([*first, *[0.0] * (8 - len(first))]) + noise * torch.randn(40, 8, generator=draws)


def rewarded(outcome, turns=(6, 6)):
    """A group of conversations of so many turns, of which the first one gets an outcome."""
    exists = torch.arange(max(turns)) < torch.tensor(turns)[:, None]
    rewards = torch.where(exists, 0.1, torch.nan)
    outcomes = torch.tensor([outcome, *[0.0] * (len(turns) - 1)])
    return RewardBatch(rewards, outcomes, exists, exists, len(turns))


def test_an_outcome_that_nobody_reached_is_kept_for_early_turns(found_on):
    """The run's rule goes farthest along what is there, and keeps the outcome from early turns."""
    rules = {"short": estimates([1.0], seed=1), "long": estimates([1.0, 0.4], seed=2)}
    kept = {"short": 0.005, "long": 1.0}
    (said, later) = _advice(found_on(rules, {ALL: estimates([1.0])}, "short", kept, rewarded(0.0)))
    assert said.startswith(
        "Take `long` instead of `short`, which is not shown to be behind, and gives the first turn 0.50%"
    )
    assert "`short` goes farther, and gives early turns less of an outcome." in said
    assert later.startswith(
        "These conversations hardly show what the outcome wants of each turn: that may decide later"
    )
    assert len(_advice(found_on(rules, {ALL: estimates([1.0])}, "short", kept, rewarded(1.0)))) == 1


def test_a_rule_that_is_near_the_best_is_kept(found_on):
    """However surely it is behind, unless it loses an outcome."""
    rules = {"near": estimates([0.9, 0.42], 0.05, seed=1), "best": estimates([1.0], 0.05, seed=1)}
    truths = {ALL: estimates([1.0], 0.05)}
    found = found_on(rules, truths, "near", {}, rewarded(1.0))
    assert found.judgement.behind("near", "best")
    (said,) = _advice(found)
    assert said.startswith("Keep `near`: of what it does worst, all rewards together, its steps go 0.9")
    assert said.endswith("of the best rule there; `best` goes less than a fifth farther.")
    (said, *_) = _advice(found_on(rules, truths, "near", {"near": 0.1}, rewarded(1.0)))
    assert said.startswith("Take `best` instead of `near`")


def test_the_default_is_not_said_to_go_farthest(found_on):
    """It is named where another rule has the best estimate, which need not lose an outcome."""
    rules = {"default": estimates([1.0, 0.4], seed=1), "far": estimates([1.0], seed=2)}
    (own, other) = (
        _advice(found_on(rules, {ALL: estimates([1.0])}, own, {}, rewarded(1.0), preferred=("default",)))[0]
        for own in ("default", "far")
    )
    assert own.startswith("Keep `default`") and own.endswith(". `far` goes farther.")
    assert other == "Keep `far`: no rule is shown to be better; more groups would tell whether `default` is."


def test_short_conversations_do_not_show_later_turns(found_on):
    rules = {"one": estimates([1.0], seed=1)}
    said = _advice(found_on(rules, {ALL: estimates([1.0])}, "one", {}, rewarded(1.0, turns=(1, 2, 12))))
    assert said[0].startswith("Keep `one`: of what it does worst, all rewards together, its steps go 1.00 [")
    assert "hardly show turns after the 5 that conversations have in the mean" in said[1]


def test_a_reward_that_goes_against_the_rest_is_named(found_on):
    rules = {"small": estimates([-0.9], seed=1), "all": estimates([0.9], seed=2)}
    paid, outcome = estimates([-0.4], seed=3), estimates([1.0], seed=4)
    truths = {ALL: paid + outcome, "outcome": outcome, "turn reward 1": paid}
    first, second = _advice(found_on(rules, truths, "small", {}, rewarded(1.0)))
    assert first.startswith("Against the rest of the rewards goes `turn reward 1`")
    assert second.startswith("Take `all` instead of `small`")
    outcome = -paid
    cancelled = {ALL: paid + outcome, "outcome": outcome, "turn reward 1": paid}
    found = found_on(rules, cancelled, "small", {}, rewarded(1.0))
    (said,) = _advice(found)
    assert said.startswith("Not enough evidence: `outcome`, `turn reward 1` goes against the rest of the rewards")
    assert as_json(found)["best"] is None and as_json(found)["opposed"] == ["outcome", "turn reward 1"]


def test_groups_that_carry_a_rare_outcome_are_counted(found_on):
    turn, outcome = estimates([0.3], 0.02), torch.zeros(40, 8)
    outcome[3] = -30.0
    truths = {ALL: turn + outcome, "outcome": outcome, "turn reward 1": turn}
    (said,) = _advice(found_on({"one": turn + outcome, "other": turn}, truths, "one", {}, rewarded(1.0)))
    assert re.match("Not enough evidence: about 1 of [0-9]+ groups carry the gradient of `all rewards`, `outc", said)


def test_another_scale_is_named_with_its_option(found_on):
    rules = {"one": estimates([0.2, 1.0], seed=1), "one, batch": estimates([1.0], seed=2)}
    found = found_on(rules, {ALL: estimates([1.0])}, None, {}, rewarded(1.0), {"one, batch": "batch"})
    assert _advice(found)[0].startswith("Take `leave_one_out` with `scale_rewards: batch`: of what it does worst")
    printed = as_json(found)["rules"]
    assert [printed[name]["scale_rewards"] for name in rules] == ["group", "batch"]


BROKEN = ("gradient", "log-probs")


@pytest.mark.parametrize("broken", BROKEN)
def test_a_model_of_nan_is_not_taken_for_the_one_that_sampled(broken):
    tree = TokenTree()
    tree.add_turn([1, 2], [3], [-0.5])
    trajectory = Trajectory([], [Turn(0, {}, num_tokens=1)], tree, session="train-0")
    numbers = torch.zeros(SIZE), torch.tensor([-0.5])
    gradient, logps = (
        each * torch.nan if name == broken else each for name, each in zip(BROKEN, numbers, strict=True)
    )
    model = SimpleNamespace(of_turn=lambda *given: (gradient, logps))
    with pytest.raises(UserError, match="'a/model' computes NaN for turn 1 of .*'train-0'"):
        compute([trajectory], model, "a/model", print)


def test_the_scale_of_the_batch_is_compared_too():
    own, rules = _rules_of({"name": "lambda_to_go", "scales": "one"})
    assert _rules_of("somebodys")[0] is None and "somebodys" not in _rules_of("somebodys")[1]  # not registered
    found, scales = _with_batch_scale(rules, own, "group")
    assert scales == {"lambda_to_go (lam 0.8, scales one), batch": "batch", f"{own}, batch": "batch"}
    assert set(found) == {*rules, *scales}
    assert _with_batch_scale(rules, own, "batch") == (rules, {})
    assert "grpo_or" in rules and set(_with_batch_scale(rules, None, "none")[1]) == {
        "lambda_to_go (lam 0.8, scales one), batch"
    }
    for rule, twice in (("mt_grpo", True), (DEFAULT_RULE, False)):  # which has that scale by itself
        own, rules = _rules_of(rule)
        assert (f"{own}, batch" in _with_batch_scale(rules, own, "group")[1]) == twice


def test_a_clear_reward_is_not_drowned_in_a_noisy_outcome():
    """The outcome is a coin. A rule with one scale gives its noise to every turn; one with two learns what is paid."""
    found = judged(coin, (-0.5,) * 6)
    one, each = "lambda_to_go (scales one)", "lambda_to_go"
    assert list(found.told) == ["turn reward 1"] and found.silent == [ALL, "outcome"]
    assert found.best == each and found.behind(one, each) and found.behind("gtpo (gamma 0.5)", each)


@pytest.mark.slow
def test_conversations_of_a_rollout_are_compared(tmp_path, capsys, prints, refused):
    recipe, folder = ROOT / "quickstart.yaml", tmp_path / "saved"
    few = ("--dataset_train_split", "train[:6]", "--num_prompts", 6, "--num_generations", 4)
    printed = prints("rollout", recipe, *few, "--save", folder)
    assert f"24 conversations in {folder}" in printed
    assert yaml.safe_load((folder / "config.yaml").read_text())["num_generations"] == 4
    (credit,) = folder.rglob("*credit*.parquet")
    parts = pq.read_table(credit).column("parts").to_pylist()
    assert {"outcome baseline", "turn baseline"} <= {part["name"] for each in parts for part in each}
    assert main(["credit", str(folder), "--max_groups", "5"]) == 0
    printed, said = capsys.readouterr()
    assert "5 groups of 4 conversations, eval, step 0" in printed and "run's)" in printed
    assert "Not measurable here: state_baseline: the run logged no `state_scores`." in printed
    assert "a forward and a backward for each: about" in said
    found = json.loads(prints("credit", folder, "--json"))
    assert found["own"] == "lambda_to_go (lam 0.8, scales batch)" and found["groups"] == 6 and found["mismatch"] < 1e-4
    assert not found["known"]  # six groups tell nothing, not even of the rule that others are compared with
    assert found["rules"]["leave_one_out"]["signal_to_noise"] == {"value": None, "low": None, "high": None}
    assert found["rules"][found["own"]]["rule"] == DEFAULT_RULE
    assert len(found["advice"]) >= 1
    assert "is there already" in refused("rollout", recipe, "--save", folder)
