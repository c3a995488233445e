"""A teacher that is shown hints: it reads as a forward of the hinted context does, and nothing else is learnt."""

import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.models import CPU_RUN, build_model
from support.trainers import assert_near, at, batch, conversation, gradient, log_probs, member, one_turn, thinking
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

from mt_grpo.envs import Step, StepEnv
from mt_grpo.errors import ConfigError
from mt_grpo.forward.packing import unique_tokens
from mt_grpo.rewards import OutcomeReward, TeacherAgreement
from mt_grpo.rollout.token_row import AnswerLeaves
from mt_grpo.runlog import read_trajectories
from mt_grpo.training import distillation
from mt_grpo.training.distillation import LOGPS

HISTORIES = (
    {"history": "strip_thinking"},
    {"history": "template", "temperature": 0.7},
    {"history": "compact", "compact_every": 1, "forward": "turn_by_turn", "distillation_topk": 3},
)


class Named(OutcomeReward):
    """1 for an answer with Lima; half a success is none."""

    def score(self, trajectory, **row):
        return 1.0 if "Lima" in (trajectory.answer or "") else 0.5


class Told(StepEnv):
    """Says after the only turn what it was worth, in words or in a reply that nobody reads."""

    def reset(self, row):
        return "Name it."

    def step(self, turn):
        if turn.text == "Lima":
            return Step(done=True, info={"feedback": "It is."})
        return Step("Look again." if "Quito" in turn.text else "", done=True)


@pytest.fixture
def teach(build):
    def make(*sees, script=thinking, **options):
        return build(script, teacher={"model": "self", "sees": list(sees)}, distillation_coef=1.0, **options)

    return make


def hinted(trainer, context, hint):
    """The ids of a context with a hint at the end of its last message."""
    end = len(context) - context[::-1].index(trainer.runner.renderer.end_id) - 1
    shown = trainer._tokenizer.encode(f"\n\n{hint}", add_special_tokens=False)
    return context[:end] + shown + context[end:]


@torch.no_grad()
def alone(trainer, path, size, hint):
    """Log-probs in the places of a path's last ids, from a forward with a hint before them."""
    ids = torch.tensor([hinted(trainer, path[:-size], hint) + path[-size:]])
    logits = trainer.model(input_ids=ids).logits[0, -size - 1 : -1].float() / trainer.temperature
    return logits.log_softmax(dim=-1)


def check_log_probs(trainer):
    """Holds what the teacher made of each turn against a forward of its own; returns how many it read."""
    read = 0
    for trajectory in trainer.batch.trajectories:
        for turn in trajectory.turns:
            ours = torch.tensor(trajectory.teacher_logprobs[turn.index])
            if trajectory.teacher_log_ratios[turn.index] is None:
                assert ours.isnan().all() and len(ours) == turn.num_tokens
                continue
            path = trajectory.tree.path_of_turn(turn.index)
            oracle = alone(trainer, path, turn.num_tokens, trajectory.teacher_hint)
            sampled = torch.tensor(path[-turn.num_tokens :])[:, None]
            assert (ours - oracle.gather(1, sampled)[:, 0]).abs().max() <= 1e-5
            if trajectory.teacher_top:
                (ids, top), likeliest = trajectory.teacher_top[turn.index].unbind(dim=1), oracle.topk(3, dim=1)
                assert ids.equal(likeliest.indices.float()) and (top - likeliest.values).abs().max() <= 1e-5
            read += 1
    return read


@pytest.mark.parametrize("options", HISTORIES, ids=str)
def test_it_reads_each_turn_with_the_answer_before_it(teach, options):
    trainer = teach("answer", **options)
    trainer.model.train()
    batch(trainer)
    assert check_log_probs(trainer) == 9
    assert {one.teacher_hint for one in trainer.batch.trajectories} == {"The right answer is\nLima 0"}


@pytest.mark.parametrize("forward", ["tree", "padded"])
def test_hints_are_read_in_forwards_of_a_bounded_size(teach, monkeypatch, forward):
    trainer, seen, score = teach("answer", forward=forward, distillation_topk=3), [], distillation.score
    trainer.model.train()
    monkeypatch.setattr(distillation, "ROW_TOKENS", 400)
    monkeypatch.setattr(distillation, "score", lambda model, plan: seen.append(plan.trees) or score(model, plan))
    batch(trainer)
    assert check_log_probs(trainer) == 9
    rows = [sum(len(tree.paths()) for tree in trees) for trees in seen]
    assert rows == [4, 4, 1] if forward == "padded" else sum(rows) == 9 and len(rows) > 1
    assert forward == "padded" or max(map(unique_tokens, seen)) <= 400


def test_no_token_of_a_hint_is_trained(teach, build):
    inputs, untaught = (batch(trainer) for trainer in (teach("answer"), build(thinking)))
    assert inputs.keys() == untaught.keys() | {LOGPS} and not inputs[LOGPS].requires_grad
    for name in untaught:
        torch.testing.assert_close(inputs[name], untaught[name], rtol=0, atol=0, equal_nan=True)


def test_it_reads_with_what_a_sibling_wrote(teach, tmp_path, caplog):
    def script(session, turn):  # the first alone succeeds
        return conversation(session, turn).replace("Lima 3", "3")

    trainer = teach("sibling", script=script, rewards=((), (Named(),)))
    trainer.model.train()
    with caplog.at_level(logging.WARNING):
        inputs = batch(trainer)
    first, *others = trainer.batch.trajectories
    written = "\n\n".join(turn.text for turn in first.turns)
    assert [one.teacher_hint for one in others] == [f"An attempt that was successful:\n{written}"] * 3
    assert first.teacher_hint is None and first.teacher_log_ratios == [None] * 3
    assert inputs[LOGPS][0].isnan().all() and not inputs[LOGPS][1].isnan().all()
    assert check_log_probs(trainer) == 6
    assert (
        "Of 4 conversations of a batch, 1 have no hint for their teacher (there is no sibling), and of 0"
        in caplog.text
    )
    trainer.train()
    assert trainer.state.log_history[0]["teacher/coverage"] == pytest.approx(6 / 9)
    caplog.clear()
    other = teach("sibling", script=script, rewards=((), (Named(),)), num_generations_eval=1)
    found = other.evaluate()  # in which no conversation has a sibling: that is no distance of 0, and no news
    assert found["eval_teacher/coverage"] == 0 and "eval_teacher/reverse_kl" not in found
    assert "have no hint" not in caplog.text
    assert [one["teacher_hint"] for one in read_trajectories(tmp_path)][:2] == [None, others[0].teacher_hint]


def test_it_reads_with_what_the_environment_said(teach):
    said = ["Lima", "Quito", "Cusco", "Lima"]
    trainer = teach("answer", "feedback", script=lambda session, turn: said[member(session)], env=Told)
    batch(trainer)
    hints = [one.teacher_hint.removeprefix("The right answer is\nLima 0") for one in trainer.batch.trajectories]
    told = "\n\nWhat will be said of this attempt:\n"
    assert hints == [f"{told}It is.", f"{told}Look again.", "", f"{told}It is."] and check_log_probs(trainer) == 4
    for trajectory in trainer.batch.trajectories:
        trajectory.info = {"verifier_log": "1 test \ud800 failed"}
    trainer.batch.taught = False
    trainer.distillation.read(trainer.batch)
    assert trainer.batch.trajectories[2].teacher_hint.endswith(f"{told}1 test ? failed")


@pytest.mark.parametrize(("sees", "causal"), [(["answer"], True), (["answer", "feedback"], False)], ids=str)
def test_what_a_teacher_knows_of_the_end_is_found(teach, sees, causal):
    trainer = teach(*sees, rewards=((TeacherAgreement(),), ()), advantage_estimator="reward_to_go")
    trainer.train()
    assert trainer.step_log.warnings.causal == {"teacher_agreement": causal}


def test_a_turn_is_not_distilled_where_its_hint_is_too_long(teach, tokenizer, caplog):
    model = build_model(tokenizer, max_position_embeddings=280)
    trainer = teach("answer", model=model, max_completion_length=250)
    with caplog.at_level(logging.WARNING):
        batch(trainer)
    turn = trainer.batch.trajectories[3].turns[2]
    assert 250 < turn.context_length + turn.num_tokens < 280 and check_log_probs(trainer) == 8
    (trajectory,) = trainer.batch.trajectories[3:]
    assert trajectory.teacher_log_ratios[2] is None
    hinted = partial(AnswerLeaves.hinted, trajectory, trainer.runner.renderer_of, trajectory.teacher_hint)
    longest = len(hinted(1000).tree.path_of_turn(2))
    assert (hinted(longest).turns, hinted(longest - 1).turns) == ([0, 1, 2], [0, 1])
    assert "and of 1 some turns have no place for it, or a context that is too long with it." in caplog.text


def test_an_answer_that_no_context_holds_is_refused_at_once(teach, tokenizer, questions):
    model = build_model(tokenizer, max_position_embeddings=280)
    long = questions.map(lambda row, place: {"answer": "Lima " * (300 if place == 1 else 9)}, with_indices=True)
    with pytest.raises(ConfigError, match=r"The answer of row 1 \(counted from 0\) has 301 tokens, and the teacher r"):
        teach("answer", model=model, max_completion_length=250, train_dataset=long)


def test_hints_that_no_conversation_can_have_are_refused(teach, build, questions):
    with pytest.raises(ConfigError, match="is the policy, which knows no more than itself: write `sees: "):
        build(teacher={"model": "self", "teacher_model_kind": "live"})
    assert build(teacher="self").teacher_weights is not None  # TRL's default, a mean of its weights
    assert teach("answer", "answer").args.teacher["sees"] == ["answer"]
    with pytest.raises(ConfigError, match="`teacher: sees.0` is 'anser': input should be 'answer', 'sibling' or 'fe"):
        teach("anser")
    with pytest.raises(ConfigError, match="`teacher: server` has another model than the policy: leave it out for"):
        build(teacher={"model": "self", "sees": ["answer"], "server": "http://127.0.0.1:1"})
    with pytest.raises(ConfigError, match="takes the right answer from the column 'answer', which the training da"):
        teach("answer", train_dataset=questions.rename_column("answer", "gold"))
    with pytest.raises(ConfigError, match="and no outcome reward says which did: name one in `outcome_reward_funcs`"):
        teach("sibling", rewards=((), ()))
    with pytest.raises(ConfigError, match="'teacher_agreement' is scored together with the outcomes, and a teach"):
        teach("sibling", rewards=((TeacherAgreement(),), (Named(),)))
    for sees, said in {
        "sibling": "sibling` reads after them",
        "feedback": "feedback` knows how a conversation",
    }.items():
        with pytest.raises(ConfigError, match=f"'teacher_log_ratio' is .* a teacher that sees `{said}"):
            teach(sees, state_score="teacher_log_ratio", advantage_estimator="state_baseline")


@torch.no_grad()
def served(model, sequences, prompt_lengths, top_logprobs, temperature):
    """What TRL's client of a vLLM server with a model answers."""
    found = {"actual_logprobs": [], "logprobs": [], "logprob_token_ids": []}
    for ids, begin in zip(sequences, prompt_lengths, strict=True):
        logprobs = (model(torch.tensor([ids])).logits[0, begin - 1 : -1] / temperature).log_softmax(dim=-1)
        own = logprobs.gather(1, torch.tensor(ids[begin:])[:, None])
        for each, values in zip(found.values(), (own, *logprobs.topk(top_logprobs)), strict=True):
            each.append(values.tolist())
    return found


@pytest.mark.parametrize("kind", ["live", "ema"])
@pytest.mark.parametrize("top", [None, 5, 335], ids=["sampled", "likeliest", "all"])
def test_loss_and_gradient_are_those_of_sdpo_trainer(build, tokenizer, questions, tmp_path, kind, top):
    keys = {"teacher_model_kind": kind} | ({"teacher_update_rate": 0.3} if kind == "ema" else {})
    options = {"loss_type": "grpo", "temperature": 0.7, "distillation_topk": top}
    build_model(tokenizer).save_pretrained(tmp_path / "begun")
    mode = {"distillation_mode": "topk_logits" if top else "sampled_token", "distillation_alpha": 1.0}
    args = SDPOConfig(str(tmp_path / "sdpo"), **CPU_RUN, **mode, **keys, **options)
    rows = questions.map(lambda row: {"privileged_context": ""})
    theirs = SDPOTrainer(str(tmp_path / "begun"), lambda **given: [], args, rows, processing_class=tokenizer)

    def follow(model, state, **_):  # its own callbacks make the mean
        theirs.model.load_state_dict(model.state_dict())
        theirs.callback_handler.on_step_end(theirs.args, state, theirs.control)

    keys |= {"model": "self", "sees": ["answer"]}
    watch = [at("on_step_end", follow)]
    trainer = build(one_turn, teacher=keys, distillation_coef=1.0, callbacks=watch, **options)
    trainer.train()
    trainer.model.train()
    inputs = batch(trainer)
    inputs["advantages"] *= 0
    inputs["old_per_token_logps"] = log_probs(trainer, inputs).detach() + torch.linspace(-1, 1, 4)[:, None]
    loss, learnt = gradient(trainer, inputs)
    if top == 5:  # those of the teacher, which TRL takes where that is on a server
        theirs.teacher_client = SimpleNamespace(get_sequence_logprobs=partial(served, theirs.teacher_model))
        theirs.use_teacher_server, theirs._last_loaded_step = True, theirs.state.global_step
    context = hinted(trainer, inputs["prompt_ids"][0].tolist(), "The right answer is\nLima 0")
    ids = torch.cat([torch.tensor([context] * 4), inputs["completion_ids"]], dim=1)
    mask = torch.cat([torch.ones(4, len(context)), inputs["completion_mask"]], dim=1)
    theirs.current_gradient_accumulation_steps = 1
    expected, other = gradient(theirs, inputs | {"teacher_input_ids": ids, "teacher_attention_mask": mask})
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert_near(learnt, other)
