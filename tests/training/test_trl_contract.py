"""What this package relies on in TRL. A failure here means: read TRL's change before touching anything else."""

import ast
import importlib
import inspect
import pkgutil
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from support.models import CPU_RUN
from support.trainers import same, weights
from transformers import PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, TrlParser, __version__
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.models import unwrap_model_for_generation

import mt_grpo
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.options.table import OPTIONS
from mt_grpo.training.config import KEEPS_TURNS

ROOMS = ("training", "weights", "app")
FOREIGN = ("trl", "transformers", "argparse")
PACKAGE = Path(mt_grpo.__file__).parent

OLDEST = Version(__version__) < Version("1.16")
needs_the_forward_of_trl = pytest.mark.skipif(
    OLDEST and find_spec("triton") is None,
    reason="TRL 1.15 computes log-probs with triton alone, which is not installed",
)

OVERRIDES = {
    GRPOTrainer: {
        "__init__": "self, model, reward_funcs=None, args=None, train_dataset=None, eval_dataset=None, "
        "processing_class=None, reward_processing_classes=None, callbacks=None, optimizers=(None, None), "
        "quantization_config=None, peft_config=None, tools=None, rollout_func=None, environment_factory=None",
        "_calculate_rewards": "self, inputs, prompts, completions, completion_ids_list",
        "_generate": "self, prompts",
        "_generate_and_score_completions": "self, inputs",
        "_get_grad_norm": "self, model, grad_norm=None",
        "_get_per_token_logps_and_entropies": "self, model, input_ids, attention_mask, logits_to_keep, "
        "batch_size=None, compute_entropy=False, compute_aux_loss=False, pixel_values=None, image_grid_thw=None, "
        "num_images=None, pixel_attention_mask=None, spatial_shapes=None, num_tiles=None, image_sizes=None, "
        "token_type_ids=None, mm_token_type_ids=None, image_position_ids=None",
        "_issue_warnings_after_load": "self, load_result",
        "create_model_card": "self, model_name=None, dataset_name=None, tags=None",
        "_get_train_sampler": "self, dataset=None",
        "_init_training_state": "self, max_steps, num_update_steps_per_epoch, num_train_epochs, "
        "resume_from_checkpoint, trial",
        "_load_best_model": "self",
        "_load_from_checkpoint": "self, resume_from_checkpoint, model=None",
        "_load_optimizer_and_scheduler": "self, checkpoint",
        "_prepare_inputs": "self, generation_batch",
        "_prepare_for_training": "self, max_steps, train_dataloader, resume_from_checkpoint",
        "_save_checkpoint": "self, model, trial",
        "compute_loss": "self, model, inputs, return_outputs=False, num_items_in_batch=None",
        "create_accelerator_and_postprocess": "self",
        "create_scheduler": "self, num_training_steps, optimizer=None",
        "get_batch_samples": "self, epoch_iterator, num_batches, device",
        "evaluate": "self, eval_dataset=None, ignore_keys=None, metric_key_prefix='eval'",
        "get_eval_dataloader": "self, eval_dataset=None",
        "log": "self, logs, start_time=None",
        "save_model": "self, output_dir=None, _internal_call=False",
        "train": "self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None",
    },
    GRPOConfig: {"__post_init__": "self"},
    VLLMGeneration: {
        "__init__": "self, model, accelerator, processing_class, mode='colocate', structured_outputs_regex=None, "
        "server_base_url=None, server_host='0.0.0.0', server_port=8000, server_timeout=240.0, group_port=51216, "
        "tensor_parallel_size=1, gpu_memory_utilization=0.9, max_model_length=None, max_num_seqs=None, "
        "enable_sleep_mode=False, model_impl='auto', trust_remote_code=False, repetition_penalty=1.0, "
        "temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_completion_length=16, logprobs=0, "
        "generation_kwargs=None",
        "_init_vllm": "self",
    },
    VLLMClient: {
        "__init__": "self, base_url=None, host='0.0.0.0', server_port=8000, group_port=51216, connection_timeout=0.0",
        "check_server": "self, total_timeout=0.0, retry_interval=2.0",
    },
    TrlParser: {"error": "self, message"},
    TrainerCallback: dict.fromkeys(
        [
            "on_evaluate",
            "on_log",
            "on_optimizer_step",
            "on_step_begin",
            "on_step_end",
            "on_train_begin",
            "on_train_end",
        ],
        "self, args, state, control, **kwargs",
    ),
}
"""
Arguments of every method of TRL or transformers that a class of ours overrides, by the class it inherits from.

`_generate` is overridden, though TRL's public `rollout_func` takes ids, log-probs and masks too, for three reasons.
TRL reads what `rollout_func` returns as one message of the assistant's, so its table of completions would show a
conversation of several turns wrongly. It counts tokens by their masks, so `num_tokens` would lack the conversations
that are left out. With `use_vllm` it first syncs the weights of a client of its own.
"""

PRIVATE = {
    GRPOTrainer: "_buffered_inputs _get_output_dir _initial_global_step _log_completion_extra _log_metric _logs "
    "_metrics _name _step _tag_names _tokenizer",
    VLLMGeneration: "_iter_named_params",
    TrlParser: "_actions _option_string_actions",
    PreTrainedModel: "_keep_in_fp32_modules _keep_in_fp32_modules_strict _no_split_modules",
}
"""Every private name of theirs that the package uses, by the class that has it."""

IMPORTS = {
    "trl": "GRPOConfig GRPOTrainer ModelConfig ScriptArguments TrlParser get_peft_config get_quantization_config",
    "trl.chat_template_utils": "add_response_schema",
    "trl.data_utils": "prepare_multimodal_messages",
    "trl.distributed": "DistributedBackend",
    "trl.generation.vllm_client": "VLLMClient",
    "trl.generation.vllm_generation": "VLLMGeneration",
    "trl.import_utils": "is_vllm_available",
    "trl.models": "get_act_offloading_ctx_manager prepare_deepspeed prepare_fsdp unwrap_model_for_generation",
    "trl.trainer.utils": "create_model_from_path selective_log_softmax",
}
"""Everything that the package imports from TRL."""


def classes():
    """Our classes that inherit from one of TRL or transformers."""
    for room in ROOMS:
        package = importlib.import_module(f"mt_grpo.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for kind in vars(importlib.import_module(module.name)).values():
                if inspect.isclass(kind) and kind.__module__ == module.name and foreign(kind):
                    yield kind


def foreign(kind):
    return [base for base in kind.__mro__ if base.__module__.split(".")[0] in FOREIGN]


def overridden(kind):
    """Names of the methods written in a class that it inherits as well; a dataclass generates others."""
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else inspect.unwrap(getattr(member, "__func__", member))
        written = inspect.isfunction(function) and Path(function.__code__.co_filename).is_relative_to(PACKAGE)
        if written and any(name in vars(base) for base in foreign(kind)):
            yield name


def arguments(method):
    """A method's arguments with their defaults, without types."""
    signature = inspect.signature(method)
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(inspect.Signature(parameters))[1:-1]


def test_overridden_methods_are_those_of_the_table():
    found = {base: {} for base in OVERRIDES}
    for kind in classes():
        for name in overridden(kind):
            base = next(base for base in OVERRIDES if issubclass(kind, base))
            found[base][name] = arguments(getattr(base, name))
    assert found == OVERRIDES


def private(name):
    return name.startswith("_") and not name.startswith("__")


def assigned(tree):
    """Private names that some source defines: functions, classes, variables, and attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


@cache
def names_of(kind):
    """Private names of a class of TRL's, transformers' or Python's: members, and what its methods assign."""
    names = set()
    for base in kind.__mro__[:-1]:
        names.update(vars(base))
        if base.__module__.split(".")[0] in FOREIGN:
            names.update(assigned(ast.parse(inspect.getsource(base))))
    return set(filter(private, names))


@cache
def nodes_of(*rooms):
    """What the source of some rooms, or of all, is made of."""
    paths = chain.from_iterable((PACKAGE / room).rglob("*.py") for room in rooms or ("",))
    return [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]


def test_every_private_name_of_theirs_is_in_the_table():
    ours = set(chain.from_iterable(assigned(ast.parse(path.read_text())) for path in PACKAGE.rglob("*.py")))
    theirs = set(chain.from_iterable(map(names_of, OVERRIDES)))
    attributes = [node for node in nodes_of(*ROOMS) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in attributes if ast.unparse(node.value) != "os" and private(node.attr)}
    replaced = {name for kind in classes() for name in vars(kind) if private(name)} & theirs  # also what is no method
    table = set(chain(*map(str.split, PRIVATE.values()), *OVERRIDES.values()))
    assert (used - ours) | (used & theirs) | replaced == set(filter(private, table))
    missing = {kind: lost for kind in PRIVATE if (lost := set(PRIVATE[kind].split()) - names_of(kind))}
    assert not missing


def test_what_is_imported_from_trl_is_in_the_table():
    imports = [node for node in nodes_of() if isinstance(node, ast.ImportFrom) and node.module]
    imports = [node for node in imports if node.module.split(".")[0] == "trl"]
    found = {(node.module, alias.name) for node in imports for alias in node.names}
    assert found == {(module, name) for module, names in IMPORTS.items() for name in names.split()}


def compared(attribute):
    """Texts that a method of TRL's trainer compares an attribute of itself with."""
    for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(GRPOTrainer)))):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == f"self.{attribute}":
            yield from (part.value for part in ast.walk(node.comparators[0]) if isinstance(part, ast.Constant))


def test_the_losses_and_scales_are_those_of_trl():
    assert set(compared("loss_type")) == set(OPTIONS["loss_type"].names)
    assert set(compared("scale_rewards")) == {"group", "batch", "none"}


def test_a_model_is_unwrapped_for_generation_with_what_we_pass():
    passed = {"model", "accelerator", "gather_deepspeed3_params"}
    passed |= set() if OLDEST else {"gradient_checkpointing_kwargs"}
    assert passed <= set(inspect.signature(unwrap_model_for_generation).parameters)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_trains_and_is_resumed(build, tmp_path, steps):
    """The whole path: sampled by the model itself, packed as trees, saved after each step."""

    def train(max_steps, resume=None):
        checkpointing = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
        trainer = build(
            None,
            env=MultiTurnToolEnv([], protocol="learnt_tags", max_steps=2),
            rewards=([], [lambda completions, **columns: [float(len(str(text))) for text in completions]]),
            **{"max_completion_length": 24, "max_steps": max_steps, "save_strategy": "steps", "save_steps": 1},
            **{"advantage_estimator": None, "learning_rate": 1e-6, **checkpointing},
        )
        before = weights(trainer)
        trainer.train(resume)
        assert trainer.state.global_step == max_steps and not same(before, weights(trainer))

    train(steps)
    train(3, str(tmp_path / f"checkpoint-{steps}"))


def test_generate_returns_eight_things():
    returned = inspect.getsource(GRPOTrainer._generate).rsplit("return ", 1)[1].strip()
    names = "prompt_ids completion_ids tool_mask completions logprobs extra_fields images tool_images"
    assert [name.strip() for name in returned.split(",")] == names.split()


@pytest.fixture
def stock(tmp_path, model, tokenizer, questions):
    """TRL's own trainer, and a batch that it scored."""

    def rollout(prompts, trainer):
        ids = [tokenizer.encode(f"Lima {index}") for index in range(len(prompts))]
        prompt_ids = [tokenizer.apply_chat_template(p, add_generation_prompt=True)["input_ids"] for p in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": [[-1.0] * len(row) for row in ids]}

    def build(**options):
        args = GRPOConfig(str(tmp_path), **CPU_RUN, **options)
        reward = lambda completions, **kwargs: [float(index) for index in range(len(completions))]  # noqa: E731
        trainer = GRPOTrainer(model, reward, args, questions, processing_class=tokenizer, rollout_func=rollout)
        trainer.current_gradient_accumulation_steps = 1
        return trainer, trainer._generate_and_score_completions([questions[0]] * 4)

    return build


def test_the_scored_batch_has_the_keys_and_shapes_we_build_on(stock):
    _, output = stock()
    width = output["completion_ids"].shape[1]
    assert output["prompt_ids"].shape == output["prompt_mask"].shape
    assert output["completion_mask"].shape == output["sampling_per_token_logps"].shape == (4, width)
    assert output["advantages"].shape == (4,) and output["num_items_in_batch"].dim() == 0


def learnt(trainer, inputs, advantages):
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, {**inputs, "advantages": advantages})
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


@needs_the_forward_of_trl
@pytest.mark.parametrize("loss_type", OPTIONS["loss_type"].names)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_where_an_advantage_a_turn_survives_in_the_gradient(stock, loss_type, level):
    """Constant advantages change nothing; `MTGRPOConfig.check_credit` refuses the losses that lose others."""
    trainer, inputs = stock(loss_type=loss_type, importance_sampling_level=level)
    mask, advantages = inputs["completion_mask"], inputs["advantages"]
    if level == "token":
        plain, constant = (learnt(trainer, inputs, each) for each in (advantages, advantages[:, None].expand_as(mask)))
        assert torch.isfinite(plain[0])
        torch.testing.assert_close(constant[0], plain[0])
    split = torch.where(torch.arange(mask.shape[1]) < 2, 1.5, -0.5).expand_as(mask) * mask
    mean = (split.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True)).expand_as(mask)
    by_turn, by_mean = (learnt(trainer, inputs, each)[1] for each in (split, mean))
    change = ((by_turn - by_mean).norm() / by_turn.norm()).item()
    lost = level == "sequence" and loss_type not in KEEPS_TURNS
    assert change < 1e-5 if lost else change > 0.1
