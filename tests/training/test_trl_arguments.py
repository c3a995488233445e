"""The trainer with the arguments of a script for TRL's trainer: what they mean there, or one sentence."""

import json
import shutil
from dataclasses import fields

import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from peft import LoraConfig, get_peft_model
from support.models import CPU_RUN, build_model, build_tokenizer, lookup
from support.trainers import Letters, batch, member
from torch import nn
from transformers import ProcessorMixin, Qwen3Config, Qwen3ForSequenceClassification
from transformers.integrations import TensorBoardCallback
from trl import GRPOConfig

from mt_grpo.data import load_rows
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.errors import ConfigError, UserError
from mt_grpo.options.values import DEFAULT_RULE
from mt_grpo.rollout import ScriptedEngine
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer

TEXTS = [{"prompt": f"capital {number}", "answer": "Lima"} for number in range(4)]
MESSAGES = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in TEXTS]
ANSWERS = ["Lima", "of Peru", "Lima Lima", "no"]
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"query": "Lima"}}\n</tool_call>'
of_both_kinds = pytest.mark.parametrize("data", [TEXTS, MESSAGES], ids=["text", "messages"])


def words(completions, **columns):
    return [float(len(completion)) for completion in completions]


@pytest.fixture
def policy(tokenizer):
    return build_model(tokenizer, max_position_embeddings=2048)


@pytest.fixture
def trainer(tmp_path, tokenizer, policy):
    """Makes trainers as scripts for TRL do."""

    def make(script=lambda session, turn: ANSWERS[member(session) % 4], config=MTGRPOConfig, model=policy,
             tokenizer=tokenizer, given=None, **options):  # fmt: skip
        options = {"max_completion_length": 200, "max_steps": 1, "learning_rate": 1e-2, **CPU_RUN, **options}
        made = {
            "args": config(str(tmp_path), **options),
            "reward_funcs": words,
            "train_dataset": TEXTS,
            "engine": ScriptedEngine(tokenizer, script) if script else None,
            "processing_class": tokenizer,
        }
        return MTGRPOEnvTrainer(model, **{**made, **(given or {})})

    return make


def sampled(trainer):
    batch(trainer)
    return trainer.batch.trajectories


# Text and messages


@of_both_kinds
def test_a_reward_function_gets_what_the_prompts_are(trainer, data):
    seen = {}

    def judge(log_extra, log_metric, **given):
        seen.update(given)
        log_extra("length", [len(ids) for ids in given["completion_ids"]])
        log_metric("seen", 2.0)
        return [float(len(ids)) for ids in given["completion_ids"]]

    batch(one := trainer(given={"reward_funcs": judge, "train_dataset": data}))
    messages = [[{"role": "assistant", "content": text}] for text in ANSWERS]
    assert [one._tokenizer.decode(ids, skip_special_tokens=True) for ids in seen["completion_ids"]] == ANSWERS
    found = seen["prompts"], seen["completions"], seen["answer"]
    assert found == ([data[0]["prompt"]] * 4, messages if data is MESSAGES else ANSWERS, ["Lima"] * 4)
    assert seen["trainer_state"] is one.state
    one.train()
    assert one.state.log_history[0]["seen"] == 2.0


def test_text_of_a_file_reaches_reward_functions_as_text(trainer, tmp_path):
    path, seen = tmp_path / "rows.jsonl", []
    path.write_text("\n".join(json.dumps(row) for row in TEXTS))

    def judge(prompts, completions, **columns):
        seen.extend(zip(prompts, completions, strict=True))
        return [0.0] * len(prompts)

    batch(one := trainer(given={"reward_funcs": judge, "train_dataset": load_rows(str(path), "train")}))
    one.rollout(1)
    assert seen[0] == seen[-1] == ("capital 0", "Lima")


def test_a_tensorboard_callback_keeps_its_writer(trainer, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path / "mine")) as writer:
        one = trainer(given={"callbacks": [TensorBoardCallback(writer)]})
        (found,) = [each for each in one.callback_handler.callbacks if isinstance(each, TensorBoardCallback)]
        assert found.tb_writer is writer


def test_a_rollout_takes_the_first_of_several_evaluation_sets(trainer):
    one = trainer(given={"eval_dataset": {"first": TEXTS[2:], "second": TEXTS}})
    assert isinstance(one.train_dataset, Dataset) and one.train_dataset.to_list() == TEXTS  # rows may be a list
    assert one.eval_dataset["first"].to_list() == TEXTS[2:]
    (found,) = one.rollout(1)
    assert found.prompt[-1]["content"] == "capital 2" and found.answer == "Lima"


# Rewards


def classifier(tokenizer):
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_labels": 1}
    config = Qwen3Config(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **size, **heads)
    return Qwen3ForSequenceClassification(config)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("models") / "judge"
    for each in (classifier(tokenizer), tokenizer):
        each.save_pretrained(folder)
    return folder


@of_both_kinds
def test_a_reward_model_gives_its_logit(trainer, reward_model, tokenizer, data):
    one, model = trainer(given={"reward_funcs": str(reward_model), "train_dataset": data}), classifier(tokenizer)
    for found in sampled(one):
        text = "capital 0" + found.turns[0].text
        if data is MESSAGES:
            text = tokenizer.apply_chat_template(found.messages, tokenize=False)
        with torch.no_grad():
            right = model(**tokenizer(text, return_tensors="pt")).logits.item()
        assert found.rewards["outcome"] == {"judge": pytest.approx(right, abs=1e-5)}
    one.train()
    assert "rewards/judge/mean" in one.state.log_history[0]


def test_models_functions_and_classes_go_together(trainer, tokenizer):
    listed = [words, classifier(tokenizer), Letters()]
    given = {"reward_funcs": listed, "reward_processing_classes": [None, tokenizer, None]}
    one = trainer(given={**given, "turn_reward_funcs": "step_reward"}, reward_weights=[0.5, 1.0, 2.0, 3.0])
    assert list(sampled(one)[0].rewards["outcome"])[::2] == ["words", "Letters"]
    assert one.reward_weights.tolist() == [0.5, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "is a Qwen3ForCausalLM, which gives words and no number"),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, "is a classifier with 3 labels: name one with one label"),
    ],
)
def test_a_model_that_gives_no_reward_is_refused(trainer, reward_model, tmp_path, change, message):
    folder = shutil.copytree(reward_model, tmp_path / "other")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        trainer(given={"reward_funcs": str(folder)})


def test_a_reward_that_gives_text_is_refused(trainer):
    with pytest.raises(RuntimeError, match="it returned '1.0': return a number"):
        batch(trainer(given={"reward_funcs": lambda completions, **columns: ["1.0"] * len(completions)}))


# Tools and options


def test_tools_are_called_in_the_models_own_format(trainer):
    calls = 7  # more than our own default of 5
    seen, options = [], {"max_completion_length": 2000}

    def judge(completions, **columns):
        seen.extend(completions)
        return [0.0] * len(completions)

    script = lambda session, turn: CALL if turn < calls else "Lima"  # noqa: E731
    found = sampled(trainer(script, given={"tools": [lookup], "reward_funcs": judge}, **options))[0]
    assert len(found.turns) == calls + 1 and found.turns[0].replies[0]["role"] == "tool"
    assert found.prompt == [{"role": "user", "content": "capital 0"}]
    # text is all that followed
    assert seen[0].startswith("<tool_call>") and "about Lima" in seen[0] and seen[0].endswith("Lima")
    without = sampled(trainer(script))[0]  # a conversation is one answer
    assert without.messages == [*found.prompt, {"role": "assistant", "content": CALL}]


def test_tool_calling_iterations_bound_the_replies(trainer):
    options = {"max_tool_calling_iterations": 2, "max_completion_length": 900}
    found = sampled(trainer(lambda session, turn: CALL, given={"tools": lookup}, **options))[0]
    assert [len(turn.replies) for turn in found.turns] == [1, 1, 0] and found.stop_reason == "max_steps"


def test_a_grpo_config_keeps_each_of_its_values(trainer, tmp_path):
    args = {"epsilon": 0.3, "temperature": 0.7, "top_p": None, "logging_steps": 3, "lr_scheduler_type": "cosine"}
    plain = GRPOConfig(str(tmp_path), **{**CPU_RUN, **args}, gradient_accumulation_steps=2)
    one = trainer(given={"args": plain})
    assert isinstance(one.args, MTGRPOConfig) and one._sampling.top_p == 1.0  # `None` keeps every token
    changed = {field.name for field in fields(plain) if getattr(plain, field.name) != getattr(one.args, field.name)}
    assert changed <= {"vllm_mode", "dataloader_pin_memory"}
    batch(one)


def test_the_rule_is_that_of_the_rewards_that_there_are(trainer, tmp_path):
    """Outcomes alone are credited as in TRL, at either level."""
    turn_rewards = {"turn_reward_funcs": ["tool_execution_reward_func"]}
    assert trainer(config=GRPOConfig, importance_sampling_level="sequence").credit_rule == "grpo_or"
    assert trainer(**turn_rewards).credit_rule == DEFAULT_RULE
    args = MTGRPOConfig(str(tmp_path), **CPU_RUN, max_completion_length=200)
    both = [trainer(given={"args": args, **given}) for given in ({}, turn_rewards)]
    assert [one.credit_rule for one in both] == ["grpo_or", DEFAULT_RULE]
    args.advantage_estimator = "leave_one_out"
    assert [one.credit_rule for one in both] == ["leave_one_out"] * 2


def test_a_processor_is_taken_for_its_tokenizer(trainer, tokenizer, policy):
    class Processor(ProcessorMixin):
        def __init__(self, tokenizer, chat_template=None):
            super().__init__(tokenizer, chat_template=chat_template)

    policy.config.image_token_id = tokenizer.unk_token_id  # TRL takes a model with a processor to see pictures
    one = trainer(given={"processing_class": Processor(tokenizer), "tools": [lookup]})
    assert [each.answer for each in sampled(one)] == ANSWERS


# What has no meaning here


def images(**columns):
    features = Features({"prompt": Value("string"), **columns})
    return Dataset.from_dict({"prompt": ["a"] * 4, **{name: [None] * 4 for name in columns}}, features=features)


ROWS = {
    "words": (["capital"], "`train_dataset` is a list whose element 0 is 'capital'"),
    "number": ([{"prompt": 3}], "first row of `train_dataset` has a prompt that is neither text nor a list of messa"),
    "empty": ([{"prompt": []}], "first row of `train_dataset` has a prompt that is neither text nor .*: '\\[\\]'"),
    "mixed": ([{"prompt": "a"}, {"prompt": []}], "rows of `train_dataset` do not make a table"),
    "none": ([{"prompt": "a"}, {"prompt": None}], "Row 1 .counted from 0. of `train_dataset` has no prompt: leave it"),
    "keys": ([{"prompt": "a", 1: 2}], "rows of `train_dataset` do not make a table"),
    "large": ([{"prompt": "a", "number": 2**70}], "rows of `train_dataset` do not make a table .*too large"),
    "several": (
        {"train": TEXTS, "test": TEXTS},
        r"several datasets \(train, test\): give one of them, as .*\['train'\]",
    ),
    "surrogate": ([{"prompt": "a\ud800"}], "rows of `train_dataset` do not make a table .*surrogates not allowed"),
    "generator": ((row for row in TEXTS), "`train_dataset` is a generator: give a `datasets.Dataset`, or a list of r"),
    "an image": (images(image=Image()), "holds images, and the model takes text only"),
    "images": (images(images=List(Image())), "holds images, and the model takes text only"),
}


def set_later(folder, **options):
    args = MTGRPOConfig(folder, **options)
    args.use_transformers_continuous_batching = True
    return args


GRPO = {"config": GRPOConfig}
TURNS = {"turn_reward_funcs": ["tool_execution_reward_func"], "importance_sampling_level": "sequence"}
ONE_OF_TWO = {"reward_funcs": [words, Letters()], "reward_processing_classes": build_tokenizer()}


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        *(({"train_dataset": data}, {}, message) for data, message in ROWS.values()),
        ({"rollout_func": lambda prompts, trainer: {}}, {}, "`rollout_func` returns tokens without turns"),
        ({"outcome_reward_funcs": [words]}, {}, "`reward_funcs` and `outcome_reward_funcs`, which are the same"),
        ({"env": [words]}, {}, "pass rewards by name, as `reward_funcs=...`"),
        ({"env": MultiTurnToolEnv([lookup]), "tools": [lookup]}, {}, "both `env` and `tools`"),
        (ONE_OF_TWO, {}, r"The number of reward processing classes \(1\)"),
        ({"reward_funcs": "./no/judge"}, {}, "'./no/judge' cannot be loaded: there is no such folder"),
        ({}, GRPO | {"generation_kwargs": {"num_beams": 2}}, "`generation_kwargs` is .* no effect"),
        ({}, {"config": set_later}, "`use_transformers_continuous_batching` is True; it has no"),
        ({}, TURNS, "lambda_to_go` gives to single turns is lost"),
    ],
    ids=[*ROWS, *map(str, range(9))],
)
def test_what_has_no_meaning_here_is_one_sentence(trainer, given, options, message):
    with pytest.raises(ConfigError, match=message):
        trainer(given=given, **options)


SAMPLED = {"use_vllm": True, "loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"}
SERVER = {"use_vllm": True, "vllm_server_base_url": "http://127.0.0.1:9", "vllm_server_timeout": 0.1}
TEMPLATE = {"tokenizer": build_tokenizer("gemma"), "given": {"tools": [lookup]}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (TEMPLATE, "`call_protocol: native` can"),
        ({"script": None, **SERVER}, "No vLLM server answered"),
        (SAMPLED, "`loss_type: vespo` needs"),
    ],
    ids=["template", "server", "sampling"],
)
def test_a_refused_trainer_leaves_no_adapter_behind(trainer, tokenizer, policy, options, message):
    first, second = (LoraConfig(target_modules=[name], task_type="CAUSAL_LM") for name in ("q_proj", "v_proj"))
    adapted = get_peft_model(build_model(tokenizer, max_position_embeddings=2048), first)
    names = [name for name, _ in policy.named_parameters()]
    for model, more in ((adapted, {}), (policy, {"peft_config": first})):
        with pytest.raises(UserError, match=message):
            trainer(model=model, beta=0.1, **{**options, "given": {**options.get("given", {}), **more}})
    assert list(adapted.peft_config) == ["default"]
    assert isinstance(trainer(model=adapted, beta=0.1).model, nn.Module)
    assert [name for name, each in policy.named_parameters() if each.requires_grad] == names
    trainable = trainer(beta=0.1, given={"peft_config": second}).model.named_parameters()
    assert {name.split(".")[6] for name, each in trainable if each.requires_grad} == {"v_proj"}


@pytest.mark.parametrize(
    ("options", "given", "problem"),
    [
        ({"reward_weights": [1.0, 2.0]}, {}, "one weight for each reward, in the order words"),
        ({}, {"train_dataset": None}, "There is no dataset: `train_dataset` is required"),
        ({}, {"train_dataset": [{"prompts": "a"}]}, "training dataset has no column `prompt`; the near"),
        ({}, {"eval_dataset": {"hard": [{"question": "a"}]}}, "evaluation dataset 'hard' has no column `prompt`"),
        (SAMPLED, {}, "`loss_type: vespo` needs"),
    ],
)
def test_what_cannot_train_is_refused_before_a_model_is_sought(tmp_path, options, given, problem):
    given = {"train_dataset": TEXTS, "args": MTGRPOConfig(str(tmp_path), **CPU_RUN, **options), **given}
    with pytest.raises(ConfigError, match=problem):
        MTGRPOEnvTrainer("/no/such/model", reward_funcs=words, **given)
