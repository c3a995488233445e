"""What the machine or the number of processes makes impossible is refused where training starts."""

import logging

import pytest
from huggingface_hub import constants
from support.recipes import RECIPES, parse_recipe, processes_of
from transformers import TrainingArguments

from mt_grpo.cli import main
from mt_grpo.errors import ConfigError
from mt_grpo.options.rules import check_batches
from mt_grpo.training import MTGRPOConfig, preflight
from mt_grpo.training.preflight import check_batch_sizes, check_folder, check_surroundings

# the others say in their names how many GPUs they are for
SEVEN = [path for path in RECIPES if path.parent.name == "Qwen" and not path.stem.endswith("gpu")]


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(preflight, "has_bfloat16", lambda: False)
    monkeypatch.setattr("mt_grpo.training.config.has_bfloat16", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def config(tmp_path):
    def make(**options):
        return MTGRPOConfig(str(tmp_path), **{"use_cpu": True, "per_device_train_batch_size": 4, **options})

    return make


@pytest.mark.parametrize("path", SEVEN, ids=lambda path: path.stem)
def test_one_process_reads_the_recipe_of_seven(path, monkeypatch, no_gpu):
    args = parse_recipe(["--config", str(path)]).training
    assert args.bf16 and args.generation_batch_size == args.per_device_train_batch_size * args.steps_per_generation
    if args.num_generations == 21:
        with pytest.raises(ConfigError, match="a device × 1 process "):
            check_batch_sizes(args)
    monkeypatch.setattr(MTGRPOConfig, "world_size", processes_of(path))
    check_batch_sizes(parse_recipe(["--config", str(path)]).training)


def test_one_process_reads_a_recipe_that_names_a_backend(config):
    """accelerate would ask the others how many they are."""
    args = config(ddp_backend="nccl", per_device_train_batch_size=8)
    assert args.world_size == 1 and args.ddp_backend == "nccl"


def test_groups_that_do_not_fit_are_refused_at_evaluation(build):
    with pytest.raises(ConfigError, match="`num_generations_eval: 3` does not divide the evaluation batch of 8"):
        build(num_generations=3).evaluate()


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"generation_batch_size": 16}, (4, 8, 16, 4)),
        ({"steps_per_generation": 3}, (4, 8, 12, 3)),
        ({"gradient_accumulation_steps": 2, "per_device_eval_batch_size": 5}, (4, 5, 8, 2)),
    ],
)
def test_batch_sizes_are_those_that_were_asked_for(config, options, sizes):
    args = config(num_generations=7, **options)
    found = (args.per_device_train_batch_size, args.per_device_eval_batch_size)
    assert (*found, args.generation_batch_size, args.steps_per_generation) == sizes


def test_deepspeed_is_held_against_the_true_batch_size(config, monkeypatch):
    told, fill_in = [], TrainingArguments.__post_init__

    def spy(args):  # DeepSpeed's own batch sizes are compared and filled in here, where it is installed
        told.append((args.per_device_train_batch_size, args.gradient_accumulation_steps))
        fill_in(args)

    monkeypatch.setattr(TrainingArguments, "__post_init__", spy)
    config(num_generations=6, gradient_accumulation_steps=3)
    assert told == [(4, 3)]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"generation_batch_size": 6, "num_generations": 2}, "`generation_batch_size: 6` is no multiple of 4"),
        ({"generation_batch_size": 8, "steps_per_generation": 1}, "can not be both configured"),
        ({"num_generations": 1}, "`num_generations` is 1; an advantage compares"),
    ],
)
def test_options_that_make_no_batch_are_refused(config, options, problem):
    with pytest.raises(ValueError, match=problem):
        check_batch_sizes(config(**options))


def test_a_seed_has_room_for_every_process(config):
    args = config(seed=2**32 - 1, num_generations=4)
    check_batch_sizes(args)
    with pytest.raises(ConfigError, match="`seed: 4294967295` is too large for 2 processes, each of which adds its"):
        check_batches(vars(args), 2)


def test_what_is_not_said_is_chosen_by_the_device(build, no_gpu, caplog):
    with caplog.at_level(logging.WARNING):
        build(use_cpu=True, bf16=None)
        assert "There is no GPU" not in caplog.text
        args = build(use_cpu=False, bf16=None).args
    assert args.device.type == "cpu" and not args.bf16 and args.mixed_precision == "no"
    assert caplog.text.count("There is no GPU here: this run is on the CPU, in float32.") == 1


@pytest.mark.parametrize(("options", "precision"), [({}, "bf16"), ({"bf16": False}, "no"), ({"fp16": True}, "fp16")])
def test_a_gpu_trains_in_bfloat16_unless_told_otherwise(config, monkeypatch, options, precision):
    for name in ("mt_grpo.training.config.has_bfloat16", "mt_grpo.training.preflight.has_bfloat16",
                 "transformers.training_args.is_torch_bf16_gpu_available"):  # fmt: skip
        monkeypatch.setattr(name, lambda: True)
    args = config(use_cpu=False, **options)
    assert args.mixed_precision == precision and args.logging_steps == 1


def test_bfloat16_on_a_cpu_that_was_asked_for_is_trained(config, no_gpu):
    check_surroundings(args := config(bf16=True))
    assert args.mixed_precision == "bf16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bf16": True}, "`bf16: true` needs a GPU .* leave `bf16` out"),
        ({"fp16": True}, "`fp16: true` needs a GPU"),
        ({"report_to": ["clearml"]}, "`report_to: clearml` needs a package .* `pip install clearml`"),
        ({"torch_compile": True}, "does not compile `forward: tree`: leave it out, or set `forward: padded`"),
        ({"push_to_hub": True}, "`push_to_hub: true` needs a token: run `hf auth login`"),
        ({"push_to_hub": True, "hub_token": "hf_x"}, "needs the Hugging Face Hub, and `HF_HUB_OFFLINE` is set"),
    ],
)
def test_what_the_machine_has_not_is_refused(config, no_gpu, monkeypatch, options, message):
    monkeypatch.setattr(preflight, "get_token", lambda: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=message):
        check_surroundings(config(use_cpu=False, **options))


def test_a_lock_that_cannot_be_taken_is_one_sentence(config, tmp_path):
    args = config()
    check_folder(args, "")
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ConfigError, match="cannot be made or written to .Is a directory.: name another"):
        check_folder(args, "")


def test_a_rollout_neither_pushes_nor_reports(tmp_path, capsys):
    options = ["--dataset_test_split", "validation[:1]", "--max_turn_length", "4", "--output_dir", str(tmp_path)]
    options += ["--push_to_hub", "true", "--report_to", "clearml", "--num_prompts", "1"]
    assert main(["rollout", "--config", "recipes/quickstart.yaml", *options]) == 0
    assert "conversation 1" in capsys.readouterr().out
