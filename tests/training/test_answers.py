"""Log-probs of right answers: equal to a forward for each, computed once, by the trainer or a server."""

import threading

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from support.conversations import converse
from support.sequence_ranks import random_trees
from support.trainers import Answered, Spelling, batch, conversation, same, weights

from mt_grpo.concurrency import run
from mt_grpo.credit import rule_name
from mt_grpo.errors import ConfigError, EngineError, UnsupportedModelError
from mt_grpo.forward.model import ForwardPlan, enable_trees, score
from mt_grpo.forward.packing import unique_tokens
from mt_grpo.rewards import AnswerLogprob, InformationGain, cut_after, score_cut
from mt_grpo.rollout import ScriptedEngine
from mt_grpo.rollout.token_row import AnswerLeaves, answer_ids
from mt_grpo.token_tree import TokenTree
from mt_grpo.training.columns import check_reward_columns
from mt_grpo.training.reward_batch import _mean_logprobs
from mt_grpo.training.rollout_batch import longest_path
from mt_grpo.trajectory import Trajectory, Turn

GAIN = ((InformationGain(),), (Answered(),))
ADAPTER = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)


@torch.no_grad()
def alone(model, context, answer):
    """One plain forward for one answer."""
    model.eval()
    logits = model(input_ids=torch.tensor([context + answer])).logits[0, len(context) - 1 : -1]
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(answer)[:, None]).mean().item()


def contexts(trajectory):
    """What the model saw before each of its turns."""
    actions = trajectory.tree.actions()
    return [trajectory.tree.path_of_turn(turn)[: -len(action)] for turn, action in enumerate(actions)]


@pytest.mark.parametrize("teacher", [None, {"model": "self", "sees": ["answer"]}], ids=["reward", "teacher"])
def test_nothing_is_sampled_with_a_model_that_scores(build, questions, monkeypatch, teacher):
    """As `mt-grpo eval` has conversations scored that have ended, while others go on with the same model."""
    env = Spelling([], protocol="learnt_tags", max_steps=8)
    rewards = ((), (Answered(),)) if teacher else GAIN
    trainer = build(None, env=env, rewards=rewards, teacher=teacher, max_turn_length=8, advantage_estimator="grpo_mr")
    engine, sampling, scored = trainer.runner.engine, threading.Event(), []
    sample = engine._generate

    def watched(*given):
        sampling.set()
        sample(*given)
        sampling.clear()

    def alone_with_model(*given):
        scored.append(sampling.wait(0.3))
        return score(*given)

    monkeypatch.setattr(engine, "_generate", watched)
    for module in ("distillation", "reward_batch"):
        monkeypatch.setattr(f"mt_grpo.training.{module}.score", alone_with_model)
    trainer.converse([dict(questions[0])] * 6, [False] * 6, 6, lambda ended: None)
    assert scored and not any(scored)


@pytest.fixture(scope="module")
def trees():
    """Leaves of trees that share nothing and of two that share all, and what was asked of each."""
    made = random_trees(0, 4)
    return [
        AnswerLeaves.after(trajectory_of(tree), [([5, 6], [7, 8, 9][: 1 + index % 3])] * tree.num_turns, 500).tree
        for index, tree in enumerate([*made, made[0]])
    ]


def trajectory_of(tree):
    return Trajectory([], [Turn(index, {}) for index in range(tree.num_turns)], tree)


def count_tokens(model):
    counted = []
    model.get_input_embeddings().register_forward_hook(lambda module, given, _: counted.append(given[0].numel()))
    return counted


@pytest.mark.parametrize("forward", ["tree", "padded", "turn_by_turn"])
def test_log_probs_equal_a_plain_forward_for_each_answer(model, trees, forward):
    paths = [[tree.path_of_turn(turn) for turn in range(tree.num_turns)] for tree in trees]
    enable_trees(model)
    counted = count_tokens(model)
    found = _mean_logprobs(model, ForwardPlan([TokenTree(), *trees], forward=forward))
    if forward == "tree":  # every token of a batch is computed once
        assert counted == [unique_tokens(trees)] and counted[0] < 0.6 * sum(len(path) for of in paths for path in of)
    assert found[0] == [] and longest_path(trees) == max(len(path) for of in paths for path in of)
    for ours, of, tree in zip(found[1:], paths, trees, strict=True):
        oracle = [alone(model, path[: -len(answer)], answer) for path, answer in zip(of, tree.actions(), strict=True)]
        assert ours == pytest.approx(oracle, abs=1e-5)


@pytest.mark.parametrize("forward", ["tree", "padded"])
def test_a_rank_with_nothing_to_score_makes_its_forward_too(model, forward):
    enable_trees(model)
    counted = count_tokens(model)
    assert _mean_logprobs(model, ForwardPlan([TokenTree(), TokenTree()], forward=forward)) == [[], []]
    assert len(counted) == 1


def check_against_oracle(trainer, trajectories):
    """Each state's value, and that the rewards are their differences."""
    scored = 0
    for trajectory in trajectories:
        before, answer = answer_ids(trainer.runner.renderer, "<answer>", trajectory.row["answer"][0])
        values = trajectory.answer_logprobs["information_gain"]
        expected = [alone(trainer.model, context + before, answer) for context in contexts(trajectory)]
        assert values == pytest.approx(expected, abs=1e-5)
        rewards = trajectory.rewards["turn"]["information_gain"]
        assert rewards[-1] is None and None not in rewards[:-1]
        assert sum(rewards[:-1]) == pytest.approx(values[-1] - values[0])
        scored += len(rewards) - 1
    return scored


@pytest.mark.parametrize("corrected", [False, True])
def test_an_evaluation_scores_the_contexts_of_its_turns(build, corrected):
    trainer = build(rewards=GAIN, num_generations_eval=1, per_device_eval_batch_size=3, use_vllm=corrected)
    trainer.evaluate()
    assert check_against_oracle(trainer, trainer.eval_trajectories) > 8


@pytest.mark.parametrize(
    "options",
    [{"forward": "tree"}, {"forward": "padded"}, {"peft_config": ADAPTER}],
    ids=["tree", "padded", "adapter"],
)
def test_rollouts_are_scored_without_training(build, options):
    """As are parts of them, as the whole. An adapter takes part in the scores."""
    trainer = build(rewards=GAIN, **options)
    trajectories = trainer.rollout(4)
    assert check_against_oracle(trainer, trajectories) == 5
    for whole in trajectories:
        asked = answer_ids(trainer.runner.renderer, "<answer>", whole.row["answer"][0])
        for index in range(len(whole.turns)):
            leaves = AnswerLeaves.after(cut_after(whole, index), [asked] * (index + 1), 400)
            (found,) = _mean_logprobs(trainer.model, ForwardPlan([leaves.tree], forward=trainer.args.forward))
            assert found == pytest.approx(whole.answer_logprobs["information_gain"][: index + 1], abs=1e-5)


def test_training_takes_the_gain_as_a_turn_reward(build):
    trainer = build(rewards=GAIN, advantage_estimator="reward_to_go", gradient_checkpointing=True)
    before = weights(trainer)
    trainer.train()
    assert trainer.state.global_step == 2 and rule_name(trainer.credit_rule) == "reward_to_go"
    assert not same(before, weights(trainer)) and trainer.model.training
    counted = trainer.batch.rewards.turn_rewards
    assert counted.shape == (4, 3) and counted.isnan().sum() == 12 - 5
    sampled = trainer.batch.trajectories[0]
    assert all(node.tokens for node in sampled.tree.nodes) and sampled.tree.num_turns == 3
    assert run(score_cut(GAIN[0], [(sampled, 0), (sampled, 1)])) == {}


class Halves(AnswerLogprob):
    """The right answer of the first turn is another one than that of later turns; the third has none."""

    name = "halves"

    def answer_at(self, turn, row):
        return ["Cusco", row["answer"][0], None][turn]


OLD_FORWARD = {
    "later steps": {"num_iterations": 2},
    "a batch in parts": {"steps_per_generation": 4, "per_device_train_batch_size": 1},
    "corrected": {"use_vllm": True},
    "another distribution": {"num_iterations": 2, "temperature": 0.6, "top_k": 20},
    "a rewritten past": {"num_iterations": 2, "history": "strip_thinking"},
}
NO_OLD_FORWARD = {
    "none": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "uncorrected": {"use_vllm": True, "vllm_importance_sampling_correction": False},
}
FORWARDS = OLD_FORWARD | NO_OLD_FORWARD


@pytest.mark.parametrize("options", FORWARDS.values(), ids=list(FORWARDS))
def test_the_forward_of_the_old_log_probs_scores_answers_too(build, options):
    """Of all rewards that ask for answers; without such a forward there is one for them."""
    plain, trainer = build(**options), build(rewards=GAIN, **options)
    trainer.state_scores = [Halves()]
    for each in (plain, trainer):
        batch(each)  # the model is proven once
    old, counted = batch(plain).get("old_per_token_logps"), count_tokens(trainer.model)
    assert (old is not None) == plain.forwards.has_old_forward == (options in OLD_FORWARD.values())
    torch.testing.assert_close(batch(trainer).get("old_per_token_logps"), old, rtol=0, atol=1e-5)
    assert len(counted) == (4 if "steps_per_generation" in options else 1)
    check_against_oracle(trainer, trainer.batch.trajectories)
    for trajectory in trainer.batch.trajectories:
        texts, values = ("Cusco", trajectory.row["answer"][0]), trajectory.answer_logprobs["halves"]
        answers = [answer_ids(trainer.runner.renderer, "<answer>", text) for text in texts]
        for (before, answer), context, value in zip(answers, contexts(trajectory), values, strict=False):
            assert value == pytest.approx(alone(trainer.model, context + before, answer), abs=1e-5)
        assert values[2:] in ([], [None])
        assert trajectory.rewards["state"]["halves"] == [*values[1:], None]


@pytest.mark.parametrize("adapter", [None, ADAPTER], ids=["whole", "adapter"])
@pytest.mark.parametrize("options", [{}, {"num_iterations": 2}], ids=["reference alone", "old too"])
def test_the_policy_scores_answers_and_not_its_reference(build, model, tmp_path, adapter, options):
    model.config._name_or_path = str(tmp_path / "model")  # where the reference is loaded from
    model.save_pretrained(tmp_path / "model")
    trainer = build(model=model, rewards=GAIN, peft_config=adapter, beta=0.1, **options)
    if adapter is None:
        trainer.model.lm_head.weight.data.mul_(1.5)
    assert ("old_per_token_logps" in batch(trainer)) == bool(options)
    assert check_against_oracle(trainer, trainer.batch.trajectories) == 5


def test_answers_are_scored_where_a_long_batch_gives_up_trees(build, monkeypatch):
    def prove(model, length, plan, precision):
        if length > 64 and plan.forward == "tree":
            raise UnsupportedModelError("The model is wrong far back, so trees cannot be packed for it.")

    monkeypatch.setattr("mt_grpo.training.forward_plan.prove", prove)
    trainer = build(rewards=GAIN, num_iterations=2)
    trainer.model.train()
    assert "old_per_token_logps" in batch(trainer) and trainer.args.forward == "padded"
    check_against_oracle(trainer, trainer.batch.trajectories)


def fail(session, turn):
    return EngineError("no") if session.endswith("0") and turn == 1 else conversation(session, turn)


def test_a_conversation_that_failed_is_not_scored(build):
    trainer = build(script=fail, rewards=GAIN)
    failed, *others = trainer.rollout(4)
    assert failed.failed and failed.answer_logprobs["information_gain"] == [None] * len(failed.turns)
    assert check_against_oracle(trainer, others) == 3


def test_a_rewritten_past_is_scored_as_the_model_saw_it(tokenizer, model):
    replies = [[{"role": "user", "content": "Q2"}]]
    trajectory, _, seen = converse(tokenizer, ["<think>a</think>one", "two"], replies, "strip_thinking")
    enable_trees(model)
    (found,) = _mean_logprobs(model, ForwardPlan([AnswerLeaves.after(trajectory, [([5], [6, 7])] * 2, 500).tree]))
    assert found == pytest.approx([alone(model, [*context, 5], [6, 7]) for context, _ in seen], abs=1e-5)


class Asked(ScriptedEngine):
    """Knows the log-prob of every token: its id."""

    async def logprobs(self, context, tokens, session):
        return [-float(token) for token in tokens]


def test_an_engine_that_scores_is_asked_instead_of_the_model(build, tokenizer):
    trainer = build(rewards=((InformationGain(prefix=""),), (Answered(),)))
    trainer.runner.engine = trainer.runner.sampler.engine = Asked(tokenizer, conversation)
    trainer.turn_reward_funcs[0].scorer = "server"
    (trajectory,) = trainer.rollout(1)
    ids = tokenizer.encode("Lima 0")
    assert trajectory.answer_logprobs["information_gain"] == [-sum(ids) / len(ids)] * 3


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"scorer": "server"}, "`scorer: server` of the reward 'information_gain' needs a vLLM server"),
        ({"column": "answers"}, "column 'answers', which the training dataset does not have; the nearest is 'answer'"),
    ],
)
def test_what_is_not_there_is_missed_at_the_start(build, options, problem):
    with pytest.raises(ConfigError, match=problem):
        build(rewards=((InformationGain(**options),), (Answered(),)))


def test_a_row_without_a_right_answer_is_found_at_the_start():
    """Those of a stream are looked at as they are scored."""
    rows = [{"prompt": "Q", "answer": "Lima"}, {"prompt": "Q", "answer": " "}]
    check_reward_columns([InformationGain()], IterableDataset.from_generator(lambda: iter(rows)), None)
    with pytest.raises(ConfigError, match="needs a right answer, and the column 'answer' of a row has ' '"):
        check_reward_columns([InformationGain()], Dataset.from_list(rows), None)
