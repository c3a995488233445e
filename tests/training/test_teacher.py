"""A teacher's log-probs are those of a plain forward per turn, whatever model it is, and what it becomes."""

from __future__ import annotations

import pytest
import torch
from support.architectures import KINDS
from support.forests import distance
from support.hybrids import ONE_OF_EACH_KIND, build_kind
from support.models import build_model, build_tokenizer
from support.trainers import batch, conversation, thinking
from transformers import AutoModelForCausalLM

from mt_grpo.errors import ConfigError
from mt_grpo.training.rollout_batch import RolloutBatch
from mt_grpo.training.teacher import read
from mt_grpo.trajectory import Trajectory

MODELS = ("llama", "gpt-oss", "gemma 2", "cohere", "granite", "gpt-2", "bloom", "qwen 2", *ONE_OF_EACH_KIND)
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
    ids=str,
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
    with pytest.raises(ConfigError, match="The model '/nowhere' cannot be loaded"):
        build(teacher="/nowhere")
    with pytest.raises(ConfigError, match="`teacher` has an unknown key 'modle'; the nearest is 'model'."):
        build(teacher={"modle": "a"})


def test_a_conversation_that_a_teacher_cannot_read_ends_the_run(teach, tokenizer):
    shown = RolloutBatch("train", [], [], trajectories=[Trajectory([], session="train-7", media={-1: None})])
    with pytest.raises(ConfigError, match="The conversation train-7 shows images, videos or sounds, and a teacher"):
        read(teach(), shown)
    long = teach(teacher=build_model(tokenizer, max_position_embeddings=128), max_completion_length=127)
    with pytest.raises(ConfigError, match="A conversation has 1.. tokens, and the teacher .* reads 128: lower"):
        batch(long)
