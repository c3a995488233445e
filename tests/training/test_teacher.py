"""A teacher's log-probs are those of a plain forward per turn, whatever model it is, and what it becomes."""

import asyncio
from functools import partial

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from support.architectures import KINDS
from support.forests import distance
from support.hybrids import ONE_OF_EACH_KIND, build_kind
from support.loopback import ScriptedServer
from support.models import build_model, build_tokenizer, lookup
from support.trainers import (
    LOSS_TYPES,
    Answered,
    assert_near,
    batch,
    conversation,
    gradient,
    log_probs,
    logged,
    one_turn,
    same,
    thinking,
    weights,
)
from support.waiting import until
from transformers import AutoModelForCausalLM
from trl import DistillationConfig, DistillationTrainer

from mt_grpo.concurrency import run
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.errors import ConfigError, ServerGoneError
from mt_grpo.rewards import TeacherAgreement, TeacherLogRatio, score_cut
from mt_grpo.runlog import read_trajectories
from mt_grpo.servers import http
from mt_grpo.token_tree import TokenTree
from mt_grpo.training.distillation import LOGPS
from mt_grpo.training.rollout_batch import TOP, RolloutBatch
from mt_grpo.training.teacher import _PROBE, _layers_of
from mt_grpo.trajectory import Trajectory

MODELS = ("llama", "gpt-oss", "gemma 2", "cohere", "granite", "gpt-2", "bloom", *ONE_OF_EACH_KIND)
STRIPS = {"history": "strip_thinking"}


@pytest.fixture
def teach(build, tokenizer, tmp_path):
    """Makes trainers with a teacher, of another size than the policy unless it is given."""

    def make(script=thinking, teacher=None, **options):
        folder = tmp_path / "teacher"
        teacher = teacher or build_model(tokenizer, seed=7, num_hidden_layers=3, hidden_size=48)
        teacher.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return build(script, teacher={"model": str(folder)}, **options)

    return make


def near(ours, oracle):
    return (ours - oracle).abs().max()


@torch.no_grad()
def alone(folder, trajectory, temperature=1.0):
    """Log-probs of each turn's tokens, from a plain forward per turn."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for turn, action in enumerate(trajectory.tree.actions()):
        path = torch.tensor([trajectory.tree.path_of_turn(turn)])
        logits = model(input_ids=path).logits[0, -len(action) - 1 : -1].float() / temperature
        found.append(logits.log_softmax(dim=-1).gather(1, path[0, -len(action) :, None])[:, 0])
    return found


def check_against_a_forward_per_turn(trainer, alike=near):
    read = 0
    for trajectory in trainer.batch.trajectories:
        expected = alone(trainer.args.teacher["model"], trajectory, trainer.temperature)
        sampled = trajectory.tree.action_logprobs()
        for turn, oracle in enumerate(expected):
            ours = torch.tensor(trajectory.teacher_logprobs[turn])
            assert alike(ours, oracle) <= 1e-5
            ratio = (ours - torch.tensor(sampled[turn])).mean().item()
            assert trajectory.teacher_log_ratios[turn] == pytest.approx(ratio, abs=1e-5)
            read += 1
    return read


@pytest.mark.parametrize(
    "options",
    [
        STRIPS,
        {"history": "compact", "compact_every": 1},
        {"history": "template", "temperature": 0.7, "top_k": 5},  # a teacher is not truncated
        {**STRIPS, "forward": "padded"},
        {**STRIPS, "forward": "turn_by_turn", "groups_without_signal": "resample"},
        {"script": conversation, "max_staleness": 1},
    ],
    ids=lambda options: ", ".join(options) if "script" in options else str(options),
)
def test_it_reads_each_turn_as_a_forward_for_it_alone(teach, options):
    trainer = teach(**options)
    before = {name: weight.clone() for name, weight in trainer.teacher_model.state_dict().items()}
    trainer.train()
    assert check_against_a_forward_per_turn(trainer) >= 8
    assert trainer.state.global_step == 2
    assert all(weight.equal(before[name]) for name, weight in trainer.teacher_model.state_dict().items())


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model_teaches(teach, tokenizer, kind):
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = build_kind(kind, vocab_size=len(tokenizer), **ids)
    trainer = teach(teacher=model, **STRIPS)
    trainer.model.train()
    batch(trainer)
    # layers with a state make much of rounding in a single token
    assert check_against_a_forward_per_turn(trainer, near if kind in KINDS else distance) >= 8
    assert trainer.args.forward == "tree"


def test_what_cannot_teach_is_refused_before_training(teach, build, tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="reads 128 tokens, and a conversation may have 400 after its prompt"):
        teach(teacher=build_model(tokenizer, max_position_embeddings=128))
    (other := build_tokenizer()).add_tokens(["Bogota"])
    build_model(other).save_pretrained(tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"another tokenizer than the policy, and 1 of its 336 tokens differ"):
        teach(processing_class=other)
    assert build(teacher=str(tmp_path / "other")).teacher_model is not None  # it knows a token more
    with pytest.raises(ConfigError, match="of which the policy has 335, and the teacher .* 336: let it be no larger"):
        build(teacher=str(tmp_path / "other"), distillation_coef=1.0, distillation_topk=5)
    with pytest.raises(ConfigError, match="The model '/nowhere' cannot be loaded"):
        build(teacher="/nowhere")
    with pytest.raises(ConfigError, match="`teacher` has an unknown key 'modle'; the nearest is 'model'."):
        build(teacher={"modle": "a"})


def test_fsdp_shards_the_layers_of_each_model(tokenizer):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, auto_wrap_policy="transformer_based_wrap")
    policy, teacher = build_model(tokenizer), build_kind("gpt-2", vocab_size=len(tokenizer))

    def prepared(model):
        plugin.set_auto_wrap_policy(model)
        return {layer.__name__ for layer in plugin.auto_wrap_policy.keywords["transformer_layer_cls"]}

    with _layers_of(teacher, plugin):
        assert prepared(teacher) == {"GPT2Block"}
    assert prepared(policy) == set(policy._no_split_modules)
    with _layers_of(teacher, plugin):
        assert prepared(teacher) == {"GPT2Block"}
    assert prepared(policy) == set(policy._no_split_modules)


def test_a_conversation_that_a_teacher_cannot_read_ends_the_run(teach, tokenizer):
    shown = RolloutBatch("train", [], [], trajectories=[Trajectory([], session="train-7", media={-1: None})])
    blind = teach(teacher=build_model(tokenizer, image_token_id=7))  # which is not the policy's
    with pytest.raises(
        ConfigError, match="The conversation train-7 shows images, videos or sounds, and a teacher has"
    ):
        blind.distillation.read(shown)
    long = teach(teacher=build_model(tokenizer, max_position_embeddings=128), max_completion_length=127)
    with pytest.raises(ConfigError, match="A conversation has 1.. tokens, and the teacher .* reads 128: lower"):
        batch(long)


# Distillation


def test_all_tokens_of_its_vocabulary_are_distilled_as_by_trl(teach, tokenizer, questions, tmp_path):
    """As by `DistillationTrainer`; `SDPOTrainer` has its test beside those of hints."""
    options = {"distillation_coef": 1.0, "temperature": 0.7, "distillation_topk": len(tokenizer)}
    trainer = teach(one_turn, loss_type="dapo", **options)
    trainer.model.train()
    inputs = batch(trainer)
    inputs["advantages"] *= 0
    loss, learnt = gradient(trainer, inputs)
    teacher = AutoModelForCausalLM.from_pretrained(trainer.args.teacher["model"], dtype=torch.float32)
    options = {"temperature": 0.7, "bf16": False, "gradient_checkpointing": False, "report_to": []}
    args = DistillationConfig(str(tmp_path / "trl"), use_cpu=True, per_device_train_batch_size=4, **options)
    models = build_model(tokenizer), teacher
    theirs = DistillationTrainer(*models, args=args, train_dataset=questions, processing_class=tokenizer)
    theirs.current_gradient_accumulation_steps = 1
    expected, other = gradient(theirs, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert_near(learnt, other)


def test_the_distance_is_divided_as_the_loss_is(teach):
    """TRL divides its KL penalty so: both are made the same number at each token."""
    trainer = teach(distillation_coef=0.5, max_staleness=1, **STRIPS)
    trainer.model.train()
    inputs, distance = batch(trainer), 0.25
    inputs["advantages"] *= 0
    inputs["importance_sampling_ratio"] = torch.ones_like(inputs["advantages"])
    logps = inputs["old_per_token_logps"] = log_probs(trainer, inputs).detach()
    penalty = torch.tensor(distance).exp() - distance - 1
    inputs[LOGPS] = torch.where(logps == 0, torch.nan, logps - penalty / logps)
    inputs["ref_per_token_logps"] = logps + distance
    for loss_type in LOSS_TYPES:
        trainer.loss_type = trainer.args.loss_type = loss_type
        losses = []
        for distilled, penalised in ((0.5, 0.0), (0.0, 0.5)):
            trainer.args.distillation_coef, trainer.beta = distilled, penalised
            losses.append(trainer.compute_loss(trainer.model, inputs))
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    trainer.args.distillation_coef, trainer.beta = 0.5, 0.0
    inputs["importance_sampling_ratio"] *= 2  # of what other weights have sampled
    torch.testing.assert_close(trainer.compute_loss(trainer.model, inputs), 2 * losses[0], rtol=1e-5, atol=0)


STEPS = {"gradient_accumulation_steps": 2, "steps_per_generation": 2}


@pytest.mark.parametrize(
    ("forwards", "options"),
    [(("tree", "turn_by_turn"), {}), (("tree", "padded"), STEPS | {"distillation_topk": 5})],
)
def test_forwards_distil_alike(teach, forwards, options):
    """Also over forked histories, of which a padded row is a copy each."""
    learnt = []
    for forward in forwards:
        trainer = teach(distillation_coef=0.3, forward=forward, optim="sgd", **STRIPS, **options)
        torch.manual_seed(0)
        trainer.train()
        learnt.append(torch.tensor(logged(trainer, "loss", "grad_norm")))
        learnt.append(torch.cat([each.flatten() for each in trainer.model.parameters()]))
    torch.testing.assert_close(learnt[:2], learnt[2:], rtol=1e-4, atol=1e-6)
    assert len(learnt[0]) == len(logged(trainer, "teacher/reverse_kl")) == 2


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "steps_per_generation": 1}], ids=str)
def test_a_teacher_alone_teaches(teach, tmp_path, options):
    trainer = teach(rewards=((), ()), distillation_coef=1.0, do_eval=True, **options)
    before = weights(trainer)
    trainer.train()
    metrics = trainer.evaluate()
    assert not same(before, weights(trainer))
    (row, *_), (record, *_) = trainer.state.log_history, read_trajectories(tmp_path)
    assert not {"reward", "reward_std", "frac_reward_zero_std"} & row.keys() and "eval_reward" not in metrics
    ratios = [each.teacher_log_ratios for each in trainer.eval_trajectories]
    assert metrics["eval_turn_1/teacher"] == pytest.approx(sum(each[0] for each in ratios) / len(ratios), rel=1e-5)
    assert metrics["eval_teacher/turn"] == pytest.approx(sum(map(sum, ratios)) / sum(map(len, ratios)), rel=1e-5)
    assert row["turn_1/teacher"] < 0 and len(record["teacher_log_ratios"]) == len(record["turns"])


def test_a_turn_earns_what_its_teacher_makes_of_it(teach, build):
    trainer = teach(rewards=((TeacherAgreement(),), ()), advantage_estimator="reward_to_go", scale_rewards="none")
    trainer.train()
    whole = trainer.batch.trajectories[0]
    assert whole.rewards["turn"]["teacher_agreement"] == whole.teacher_log_ratios and len(whole.turns) == 3
    assert trainer.batch.advantages.abs().sum() > 0
    assert run(score_cut([TeacherAgreement()], [(whole, 0), (whole, 1)])) == {}
    with pytest.raises(
        ConfigError, match="'teacher_agreement' asks a teacher, and there is none: name one in `teacher"
    ):
        build(rewards=((TeacherAgreement(),), ()))
    with pytest.raises(
        ConfigError, match="There is no reward: .*, or set `distillation_coef` to learn from the teach"
    ):
        teach(rewards=((), ()))


def test_what_a_teacher_said_so_far_scores_a_state(teach, build):
    options = {"state_score": "teacher_log_ratio", "advantage_estimator": "state_baseline"}
    trainer = teach(**options)
    trainer.train()
    for row, whole in enumerate(trainer.batch.trajectories):
        ratios = torch.tensor(whole.teacher_log_ratios)
        expected = ratios.cumsum(dim=0) / torch.arange(1, len(ratios) + 1)
        torch.testing.assert_close(trainer.batch.rewards.state_scores[row, : len(ratios)], expected)
    whole.teacher_log_ratios = [None, 3.0, None]
    assert [TeacherLogRatio().score(turn, whole) for turn in whole.turns] == [None, 3.0, 3.0]
    with pytest.raises(ConfigError, match="'teacher_log_ratio' asks a teacher, and there is none: name one in `teach"):
        build(**options)


def test_a_run_that_goes_on_has_a_teacher_again(teach, build, tmp_path):
    def ran(folder, resume=None, **more):
        options = {
            "distillation_coef": 1.0,
            "gradient_accumulation_steps": 1,
            "steps_per_generation": 2,
            "max_steps": 3,
        }
        trainer = teach(rewards=((), ()), output_dir=str(tmp_path / folder), **options, **more)
        trainer.train(resume and str(tmp_path / resume))
        return trainer

    whole = ran("whole")
    ran("cut", save_strategy="steps", save_steps=1)  # in the middle of a batch
    assert same(weights(whole), weights(ran("cut", "cut/checkpoint-1")))
    with pytest.raises(ConfigError, match="was made with `teacher: True`, and this run has `teacher: False`: resume"):
        build(output_dir=str(tmp_path / "cut"), steps_per_generation=2).train(str(tmp_path / "cut/checkpoint-1"))
    with pytest.raises(ConfigError, match="with `distillation_topk: None`, and this run has `distillation_topk: 5`"):
        ran("cut", "cut/checkpoint-1", distillation_topk=5)


def test_a_replayed_run_is_read_by_a_teacher(teach, build, tmp_path):
    build(thinking, output_dir=str(tmp_path / "first"), **STRIPS).train()
    again = teach(distillation_coef=1.0, replay=str(tmp_path / "first"), output_dir=str(tmp_path / "again"))
    again.train()
    assert check_against_a_forward_per_turn(again) >= 8 and again.state.global_step == 2


def test_a_replay_is_refused_a_teacher_that_does_not_fit(build, questions, tmp_path):
    def ran(name, run=None, sees=("answer",), gate=None, rewards=(), **given):
        teacher = {"model": "self", "sees": list(sees), **({"gate": gate} if gate else {})}
        options = {"rewards": (rewards, (Answered(),)), "max_steps": 1, "distillation_coef": 1.0, "teacher": teacher}
        folders = {"output_dir": str(tmp_path / name), **({"replay": str(tmp_path / run)} if run else {})}
        build(None if run else thinking, **folders, **options, **given).train()

    agreement = (TeacherAgreement(),)
    ran("first", rewards=agreement)
    (tmp_path / "gates.py").write_text("def whole(trajectory):\n    return [True] * len(trajectory.turns)\n")
    ran("same", "first", gate=f"{tmp_path}/gates.py:whole", rewards=agreement)
    ran("other", "first", ["feedback"])  # which reads the conversations itself
    with pytest.raises(ConfigError, match="'teacher_agreement' of the run .* are by another teacher .*'feedback'"):
        ran("refused", "first", ["feedback"], rewards=agreement)
    ran("without", sees=["feedback"], train_dataset=questions.remove_columns("answer"), eval_dataset=None)
    with pytest.raises(ConfigError, match="from the column 'answer', which the rows of the run .* did not have"):
        ran("refused", "without")


# A teacher on a server


class TeachersServer:
    """What a vLLM server says of a prompt's tokens: a model's log-probs, unless it gives none."""

    def __init__(self, folder, length=512, scores=True, served="id"):
        self.folder, self.length, self.scores, self.served = folder, length, scores, served
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.http = ScriptedServer(self.answer)

    def answer(self, method, path, body):
        if path == "/v1/models":
            return 200, {"data": [{self.served: "big", "root": str(self.folder), "max_model_len": self.length}]}
        with torch.no_grad():
            whole = self.model(torch.tensor([body["prompt"]])).logits[0, :-1].log_softmax(dim=-1)
        rows = []
        for token, logprobs in zip(body["prompt"][1:], whole, strict=True):
            shown = [token, *logprobs.topk(body["prompt_logprobs"]).indices.tolist()]
            rows.append({str(each): {"logprob": logprobs[each].item()} for each in shown})
        return 200, {"choices": [{"prompt_logprobs": [None, *rows]} if self.scores else {"text": "a"}]}


class Late(MultiTurnToolEnv):
    """Its last conversation of a step ends once a teacher was asked about another of that step."""

    def __init__(self, server):
        super().__init__([lookup], protocol="learnt_tags", max_steps=3)
        self.server = server

    async def step(self, turn):
        number = int(self.session.split("-")[1])
        if self.session.endswith("3"):
            wait = partial(until, lambda: len(self.server.http.asked("/v1/completions")) > 1 + number, limit=60)
            await asyncio.to_thread(wait)
        return await super().step(turn)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_server_reads_what_has_ended_while_others_go_on(teach, build, staleness):
    folder = teach().args.teacher["model"]
    server = TeachersServer(folder)
    given = {"model": folder, "server": server.http.url}
    trainer = build(conversation, env=Late(server), teacher=given, distillation_coef=1.0, max_staleness=staleness)
    trainer.train()
    assert check_against_a_forward_per_turn(trainer) >= 4 and trainer.state.global_step == 2
    assert not [each["error"] for each in read_trajectories(trainer.args.output_dir) if each["error"]]


def test_a_server_teaches_as_the_model_does(teach, build, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(http, "DELAYS", ())
    folder = teach().args.teacher["model"]
    server = TeachersServer(folder)
    trainer = build(thinking, teacher={"model": folder, "server": server.http.url}, distillation_coef=1.0, **STRIPS)
    shown = RolloutBatch("train", [], [], trajectories=[Trajectory([], session="train-7", media={-1: None})])
    with pytest.raises(ConfigError, match="sounds, and a teacher on a server reads text only: name its `model` alone"):
        trainer.distillation.read(shown)
    trainer.train()
    assert trainer.teacher_model is None and check_against_a_forward_per_turn(trainer) >= 8
    asked = [each for each in server.http.asked("/v1/completions") if each["prompt"] != _PROBE]
    # one for each different branch, whole
    branches = [path for each in trainer.batch.trajectories for path in each.tree.sequences()]
    last = {tuple(path.tokens[: max(torch.tensor(path.mask).nonzero()) + 1]) for path in branches}
    assert len(asked) == 2 * len(last) and asked[-1]["prompt_logprobs"] == 0
    assert {tuple(each["prompt"]) for each in asked[len(last) :]} == last == set(trainer.teacher._asked)
    tree = TokenTree()
    tree.add_turn([1, 2], [3], [0.0])
    tree.extend([4, 5], [], [])  # a turn that sampled nothing
    assert [list(map(len, turns)) for turns in trainer.teacher.read([tree])[0]] == [[1, 0]]
    assert server.http.asked("/v1/completions")[-2]["prompt"] == [1, 2, 3]
    server.model, own = build_model(tokenizer), server.model  # by the same name
    with pytest.raises(
        ServerGoneError, match="has another model than when the run began: .* Start it again with 'big'"
    ):
        trainer.teacher.read([tree])
    server.model = own
    server.scores = False  # an error that keeps a checkpoint of the run
    with pytest.raises(ServerGoneError, match="not read a conversation: .* Start it again, or name `model` alone"):
        trainer.teacher.read([tree])
    server.scores = True

    options = {"distillation_coef": 1.0, "distillation_topk": 5, **STRIPS}
    where = {"model": folder}, {"model": folder, "server": server.http.url}
    here, there = (batch(build(thinking, teacher=teacher, **options))[TOP] for teacher in where)
    torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-5, equal_nan=True)

    build_model(tokenizer).save_pretrained(other := str(tmp_path / "other"))
    tokenizer.save_pretrained(other)

    def refused(message, model=folder, **given):
        with pytest.raises(ConfigError, match=message):
            build(teacher={"model": model, "server": TeachersServer(folder, **given).http.url})

    refused("gives no log-probs of prompts .`prompt_logprobs: 0`., as a vLLM server does: ", scores=False)
    refused("gives no log-probs of prompts .*, as a vLLM server does: .*/v1/models", served="name")
    refused("reads 399 tokens, and a conversation may have 400 after", length=400)
    with pytest.raises(ConfigError, match="serves 'big', not '.*': name that model, or another server."):
        build(teacher={"model": other, "server": server.http.url})
    with pytest.raises(ConfigError, match="The teacher's server is not up: .* Start it, or name `mo"):
        build(teacher={"model": folder, "server": "http://127.0.0.1:9"})
