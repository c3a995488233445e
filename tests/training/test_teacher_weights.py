"""The policy as it was teaches with the weights of the formula, and a resumed run goes on with them."""

import pytest
import torch
from peft import LoraConfig
from support.trainers import at, same, thinking, weights
from trl.distributed import DistributedBackend

from mt_grpo.errors import ConfigError
from mt_grpo.training.teacher import TEACHER, TeacherWeights

ADAPTER = LoraConfig(target_modules=["q_proj", "v_proj"])
STEPS = {"max_steps": 5, "gradient_accumulation_steps": 1, "distillation_coef": 1.0}


@pytest.fixture
def teach(build):
    def make(kind, sees=None, **options):
        keys = {name: options.pop(name) for name in list(options) if name.startswith("teacher_")}
        teacher = {"model": "self", "teacher_model_kind": kind, **keys, **({"sees": sees} if sees else {})}
        return build(thinking, teacher=teacher, **{**STEPS, **options})

    return make


def trained(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("adapter", [None, ADAPTER], ids=["whole", "adapter"])
@pytest.mark.parametrize("kind", ["base", "ema"])
def test_the_policy_as_it_was_reads_each_batch(teach, adapter, kind):
    after = []
    watch = at("on_step_end", lambda model, **_: after.append(trained(model)))
    keys = {"teacher_update_rate": 0.3, "teacher_sync_steps": 2} if kind == "ema" else {}
    trainer = teach(kind, peft_config=adapter, callbacks=[watch], **keys)
    expected = trained(trainer.model)
    assert adapter is None or all("lora_" in name for name in expected)
    trainer.train()
    for step in (1, 3) if kind == "ema" else ():
        expected = {name: 0.7 * weight + 0.3 * after[step][name] for name, weight in expected.items()}
    found = trainer.teacher_weights.weights
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-8)
    own = trained(trainer.model)
    assert found.keys() == expected.keys() and all(own[name].equal(weight) for name, weight in after[4].items())
    trainer.model.load_state_dict(expected, strict=False)
    for whole in trainer.batch.trajectories:  # of the last step, which the mean after the fourth has read
        for turn, logprobs in zip(whole.turns, whole.teacher_logprobs, strict=True):
            path = torch.tensor([whole.tree.path_of_turn(turn.index)])
            with torch.no_grad():
                found = trainer.model(input_ids=path).logits[0, -turn.num_tokens - 1 : -1].log_softmax(dim=-1)
            own = found.gather(1, path[0, -turn.num_tokens :, None])[:, 0]
            torch.testing.assert_close(torch.tensor(logprobs), own, rtol=1e-4, atol=1e-5)


def test_a_mean_that_follows_at_once_is_the_live_policy(teach):
    learnt = []
    for kind, keys in {"live": {}, "ema": {"teacher_update_rate": 1}, "base": {}}.items():
        (trainer := teach(kind, ["answer"], **keys)).train()
        learnt.append(weights(trainer))
    live, at_once, base = learnt
    assert same(live, at_once) and not same(live, base)


@pytest.mark.parametrize(("kind", "adapter"), [("base", ADAPTER), ("ema", None)], ids=["base", "ema"])
def test_a_resumed_run_has_the_same_teacher(teach, tmp_path, adapter, kind):
    def ran(folder, resume=None, **more):
        trainer = teach(kind, steps_per_generation=2, output_dir=str(tmp_path / folder), peft_config=adapter, **more)
        trainer.train(resume and str(tmp_path / resume))
        return trainer

    whole = ran("whole")
    ran("cut", save_strategy="steps", save_steps=3)  # in the middle of a batch
    resumed = ran("cut", "cut/checkpoint-3")
    assert same(weights(whole), weights(resumed))
    assert same(*(list(one.teacher_weights.weights.values()) for one in (whole, resumed)))
    file = tmp_path / "cut/checkpoint-3" / TEACHER
    model = f"{'adapter_' if adapter else ''}model.safetensors"  # vLLM reads all of that ending
    assert [each.name for each in file.parent.glob("*.safetensors")] == [model]
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match=f"is damaged, its {TEACHER} cannot be read"):
        ran("cut", "cut/checkpoint-3")
    file.unlink()
    with pytest.raises(ConfigError, match="has no weights of a teacher .* set `teacher_model_kind: live`"):
        ran("cut", "cut/checkpoint-3")


def test_the_policy_has_its_weights_back_whatever_happens(teach):
    trainer = teach("base", max_steps=1)
    trainer.train()
    own = weights(trainer)
    with pytest.raises(RuntimeError), trainer.teacher_weights.lent():
        assert not same(own, weights(trainer))
        raise RuntimeError
    assert same(own, weights(trainer))


def test_a_policy_teaches_itself_as_its_mean_if_nothing_is_said(build):
    options = {"teacher": {"model": "self", "sees": ["answer"]}, "distillation_coef": 0.1}
    weights = build(["Hi"], **options).teacher_weights
    assert (weights._kind, weights._rate, weights._every) == ("ema", 0.05, 1)


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({"model": "a", "teacher_model_kind": "ema"}, "says which weights of the policy teach, and the teacher is"),
        (
            {"model": "self", "teacher_model_kind": "live", "teacher_update_rate": 0.1},
            "rate` says how a mean of the policy",
        ),
        ({"model": "self", "teacher_model_kind": "base", "teacher_sync_steps": 1}, "teacher_sync_steps` says how"),
        ({"model": "self", "teacher_model_kind": "ema", "teacher_update_rate": 0}, "should be greater than 0"),
        ({"model": "self", "teacher_model_kind": "mean"}, "`teacher: teacher_model_kind` is 'mean': input should be"),
    ],
)
def test_kinds_of_a_teacher_that_cannot_be_are_refused(build, teacher, message):
    with pytest.raises(ConfigError, match=message):
        build(teacher=teacher)


def test_weights_that_cannot_be_exchanged_are_refused(teach, monkeypatch):
    trainer = teach("ema")
    for name, said in {"is_zero3": "DeepSpeed ZeRO-3", "is_fsdp": "FSDP 1"}.items():
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=f"{said} does not let it: shard with"):
            patch.setattr(DistributedBackend, name, True)
            TeacherWeights.of(trainer)
