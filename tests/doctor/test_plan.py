"""The formulas of `mt-grpo doctor`, beside a worked example and what torch reports; the command as a user calls it."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from support.architectures import build_random
from support.audio import SOUND_FAMILIES
from support.hybrids import build_hybrid
from support.models import build_model
from support.recipes import ROOT
from transformers import AutoConfig, AutoModelForCausalLM

from mt_grpo.cli import main
from mt_grpo.data import embedded
from mt_grpo.doctor import GPU, checks
from mt_grpo.doctor.checks import _made_arguments
from mt_grpo.doctor.memory import COPIES, GB, Load, Precision, Shape, Sharding, four_bit
from mt_grpo.doctor.plan import PLAN
from mt_grpo.doctor.step_time import _assumed_lengths, _Lengths, _server_seconds, _speed_of, _Step, recomputed
from mt_grpo.errors import ConfigError
from mt_grpo.tools.search import CorpusSearch, WikipediaSearch

EMBEDDED = Path(embedded.__file__).parent / "model"
HALF = Precision(2.0, 2)


def qwen(kind: int, *sizes: int, **keys: object) -> dict:
    """A configuration of Qwen2.5 or Qwen3: hidden, intermediate, layers, heads, heads of keys, and vocabulary."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    family = {"architectures": [f"Qwen{kind}ForCausalLM"], "model_type": f"qwen{kind}", "dtype": "bfloat16"}
    places = {"max_position_embeddings": 32768 if kind == 2 else 40960, "tie_word_embeddings": False}
    return {**family, **places, **dict(zip((*names, "vocab_size"), sizes, strict=True)), **keys}


SHAPES = {
    "Qwen2.5-7B": qwen(2, 3584, 18944, 28, 28, 4, 152064),
    "Qwen2.5-3B": qwen(2, 2048, 11008, 36, 16, 2, 151936, tie_word_embeddings=True),
    "Qwen2.5-1.5B": qwen(2, 1536, 8960, 28, 12, 2, 151936, tie_word_embeddings=True),
    "Qwen3-8B": qwen(3, 4096, 12288, 36, 32, 8, 151936, head_dim=128),
    "Qwen3-32B": qwen(3, 5120, 25600, 64, 64, 8, 151936, head_dim=128),
    "Qwen3-1.7B": qwen(3, 2048, 6144, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True),
}


def model_folder(folder, name, **changes):
    """A folder with the shape of a model and the embedded tokenizer, without weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SHAPES[name.removeprefix("Qwen/")], **changes}))
    for file in (*EMBEDDED.glob("*token*"), EMBEDDED / "chat_template.jinja"):
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


@pytest.fixture(scope="module")
def seven(tmp_path_factory):
    return AutoConfig.from_pretrained(model_folder(tmp_path_factory.mktemp("seven") / "model", "Qwen2.5-7B"))


@pytest.fixture(scope="module")
def shape(seven):
    return Shape.of(seven)


@pytest.fixture
def doctor(tmp_path, capsys):
    """Runs the doctor on a recipe for a model in `tmp_path / "model"`; returns its findings by check, and its plan."""

    def run(*options, recipe="triviaqa_7b", tools=("--tools", "calculator")):
        place = ["--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(tmp_path / "run")]
        main(["doctor", str(ROOT / "Qwen" / f"{recipe}.yaml"), *place, *tools, *map(str, options), "--json"])
        printed = json.loads(capsys.readouterr().out)
        return {one["check"]: one for one in printed["findings"]}, printed["plan"]

    return run


def test_the_worked_example_of_seven_billion_parameters(shape):
    spread = [shape.states(HALF, Sharding.read(name), 7) / GB for name in ("zero3", "fsdp2", "zero2")]
    assert spread == pytest.approx([17.4, 17.4, 43.5], abs=0.05)
    assert shape.parameters / 1e9 == pytest.approx(7.62, abs=0.01)
    assert shape.layers * shape.input_of_layer(51_552, 2) / GB == pytest.approx(10.3, abs=0.06)
    assert 51_552 * shape.vocabulary * 2 / GB == pytest.approx(15.7, abs=0.05)
    tokens = shape.server_tokens(80 * GB, 2)
    assert (shape.kv_bytes(2), tokens // 8192, tokens // 2500) == (57_344, 114, 375)
    assert tokens == pytest.approx(938_000, rel=0.001)
    assert 3 * shape.checkpoint(HALF, Sharding.read("zero3")) / GB == pytest.approx(320, abs=0.5)


def test_the_recipe_of_the_example_is_planned(tmp_path, doctor):
    model_folder(tmp_path / "model", "Qwen2.5-7B")
    found, plan = doctor("--num_processes", 7, "--gpu_memory", 80, "--accelerate_config", "zero3")
    assert plan["training"]["tokens"] == 14_688  # 12 conversations of 1,024 tokens behind a prompt of 200
    assert plan["training"]["bytes of states"] / GB == pytest.approx(17.4, abs=0.05)
    assert plan["server"]["bytes of a token"] == 57_344
    assert plan["weights"]["bytes"] / GB == pytest.approx(30.5, abs=0.05)
    assert (plan["files"]["kept"], plan["files"]["checkpoints"] / GB) == (2, pytest.approx(213, abs=0.5))
    assert set(plan["splits"]) == {"7 + 1", "6 + 2", "5 + 3", "4 + 4"}
    assert min(plan["step"]["sampling"], plan["step"]["training"]) > 0 and not plan["step"]["calibrated"]
    assert found["training memory"]["status"] == "ok" and "with zero3" in found["training memory"]["what"]


@pytest.mark.parametrize(
    ("recipe", "gpu_memory", "launched"),
    [
        ("triviaqa_7b", 80, ["--accelerate_config", "zero3"]),
        ("triviaqa_3b", 40, ["--accelerate_config", "zero3"]),
        ("triviaqa_1.5b", 24, ["--accelerate_config", "zero3"]),
        ("triviaqa_3b_4gpu", 40, ["--accelerate_config", "zero3", "--num_processes", "3"]),
        ("triviaqa_1.5b_2gpu", 40, ["--accelerate_config", "zero2", "--num_processes", "1"]),
        ("triviaqa_1.5b_1gpu", 24, ["--num_processes", "1"]),
    ],
)
def test_a_recipe_fits_the_gpus_that_it_names(recipe, gpu_memory, launched, tmp_path, monkeypatch, doctor):
    text = (ROOT / "Qwen" / f"{recipe}.yaml").read_text()
    assert f"of {gpu_memory} GB" in text.split("\n\n")[0]
    model_folder(tmp_path / "model", yaml.safe_load(text)["model_name_or_path"])
    monkeypatch.setattr(WikipediaSearch, "search", CorpusSearch(["Lima: The capital of Peru."]).search)
    found, _ = doctor("--gpu_memory", gpu_memory, *launched, recipe=recipe, tools=())
    assert "fail" not in {one["status"] for one in found.values()}
    assert found["processes"]["status"] == found["training memory"]["status"] == "ok"
    assert "16 prompts × 21" in found["processes"]["what"]
    assert recipe.endswith("1gpu") or found["server memory"]["status"] == "ok"


SANDBOX = '{"type": "harbor", "tasks": "embedded", "eval_tasks": "embedded", "sandbox": "bubblewrap"}'


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed: run `make sandbox`")
@pytest.mark.parametrize("recipe", sorted(path.stem for path in ROOT.glob("terminal/*gpu.yaml")))
def test_a_recipe_of_terminals_fits_its_gpus(recipe, tmp_path, doctor):
    text = (ROOT / "terminal" / f"{recipe}.yaml").read_text()
    assert "of 80 GB" in text.split("\n\n")[0]
    model_folder(tmp_path / "model", yaml.safe_load(text)["model_name_or_path"])
    processes = re.search(r"--num_processes (\d)", text)
    launched = (
        ["--accelerate_config", "fsdp2", "--num_processes", processes[1]] if processes else ["--num_processes", 1]
    )
    more = ["--gpu_memory", 80, "--env", SANDBOX, *launched]
    found, _ = doctor(*more, recipe=f"../terminal/{recipe}", tools=())
    assert "fail" not in {one["status"] for one in found.values()}
    for name in ("processes", "sandbox", "training memory", "server memory", "step"):
        assert found[name]["status"] == "ok", found[name]


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_training_and_serving_on_the_same_gpus_is_planned(gpus, tmp_path, doctor):
    recipe = f"gsm8k_colocate_{gpus}gpu"
    model_folder(tmp_path / "model", "Qwen/Qwen3-1.7B")
    options = ["--gpu_memory", 80, "--num_processes", gpus, *(["--accelerate_config", "zero2"] if gpus > 1 else [])]

    def plan(*more):
        return doctor(*options, *more, recipe=recipe, tools=())

    found, whole = plan()
    assert "of 80 GB" in (ROOT / "Qwen" / f"{recipe}.yaml").read_text().split("\n\n")[0]
    statuses = {found[name]["status"] for name in ("training memory", "server memory", "server")}
    assert statuses <= {"ok", "warn"} and "the trainer starts" in found["server"]["what"]
    assert whole["training"]["available"] / GB == pytest.approx(78)  # a server that sleeps keeps little
    assert whole["sampling"]["server"] / GB == pytest.approx(0.65 * 80)
    assert "splits" not in whole
    if gpus == 1:
        awake, shared = plan("--vllm_enable_sleep_mode", "false")
        assert shared["training"]["available"] / GB == pytest.approx(0.35 * 80)
        assert awake["training memory"]["status"] == "fail"
        full, _ = plan("--vllm_gpu_memory_utilization", "0.9")
        assert re.search(r"`vllm_gpu_memory_utilization: 0\.7\d` at most", full["server memory"]["mend"])


def test_the_first_recipe_of_the_readme_fits_the_gpu_it_names(tmp_path, monkeypatch, prints):
    readme = (ROOT.parent / "README.md").read_text()
    code, recipe = (re.findall(rf"```{language}\n(.*?)```", readme, re.DOTALL)[-1] for language in ("python", "yaml"))
    assert "of 24 GB" in readme
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_agent", raising=False)
    Path("my_agent.py").write_text(code)
    Path("my_agent.yaml").write_text(recipe)
    Path("questions.jsonl").write_text('{"prompt": "Which country has Lima as its capital?", "answer": "Peru"}')
    model = model_folder(tmp_path / "model", yaml.safe_load(recipe)["model_name_or_path"].removesuffix("-Instruct"))
    options = ["--num_processes", "1", "--gpu_memory", "24", "--model_name_or_path", model, "--json"]
    findings = json.loads(prints("doctor", "my_agent.yaml", *options))["findings"]
    assert {one["check"]: one["status"] for one in findings}["training memory"] == "ok"


# What is advised

ADAPTER = "--use_peft true --dtype bfloat16"
MICRO_BATCH = "--beta 0.1 --per_device_train_batch_size 48 --gradient_accumulation_steps 1"


@pytest.mark.parametrize(
    ("model", "options", "ways"),
    [
        ("Qwen2.5-7B", f"--gpu RTX-4090 --num_processes 1 {ADAPTER}", ["per_device_train_batch_size", "load_in_4bit"]),
        (
            "Qwen2.5-7B",
            f"--gpu H100 --num_processes 7 --accelerate_config zero2 {MICRO_BATCH}",
            ["per_device_train_batch_size", "--accelerate_config", "offload_optimizer_device"],
        ),
        (
            "Qwen3-32B",
            "--gpu H100 --num_processes 8 --accelerate_config zero3",
            ["offload_optimizer_device", "processes", "use_peft"],
        ),
        (
            "Qwen2.5-3B",
            f"--gpu A10G --num_processes 1 --gradient_checkpointing false {ADAPTER}",
            ["gradient_checkpointing", "per_device_train_batch_size"],
        ),
    ],
    ids=["an adapter", "a large micro-batch", "a large model", "no checkpointing"],
)
def test_what_is_advised_fits_by_the_same_plan(model, options, ways, tmp_path, doctor):
    model_folder(tmp_path / "model", model)

    def memory(*more):
        return doctor(*options.split(), *more)[0]["training memory"]

    failed = memory()
    assert failed["status"] == "fail"
    advised = failed["mend"].removeprefix("take ").split(" or ")
    assert all(way in words for way, words in zip(ways, advised, strict=False)), advised
    for words in advised:
        given = [word for name, value in re.findall(r"`(\w+): (\S+)`", words) for word in (f"--{name}", value)]
        given += ["--num_processes", number[1]] if (number := re.match(r"(\d+) processes", words)) else []
        given += ["--accelerate_config", "zero3"] if "`--accelerate_config zero3`" in words else []
        if "offload_optimizer_device" in words:
            content = {"distributed_type": "DEEPSPEED"}
            content["deepspeed_config"] = {"zero_stage": 3, "offload_optimizer_device": "cpu"}
            (tmp_path / "offload.yaml").write_text(yaml.safe_dump(content))
            place = given.index("--offload_optimizer_device")
            given[place : place + 2] = ["--accelerate_config", str(tmp_path / "offload.yaml")]
        assert memory(*given)["status"] == "ok", words


def test_ways_for_one_conversation_that_does_not_fit_are_named(tmp_path, doctor):
    model_folder(tmp_path / "model", "Qwen2.5-7B", max_position_embeddings=2**20)
    command = "--gpu H100 --num_processes 8 --per_device_train_batch_size 1 --gradient_accumulation_steps 42"
    command += " --max_completion_length 200000 --vllm_max_model_length 220000"

    def found(*options):
        return doctor(*command.split(), *options)[0]

    failed = found()["training memory"]
    assert failed["status"] == "fail"
    size = re.search(r"take `sp_size: (\d)` and `--accelerate_config fsdp2`", failed["mend"])[1]
    taken = found("--sp_size", size, "--accelerate_config", "fsdp2")["training memory"]
    assert taken["status"] == "ok" and f"tokens that {size} share" in taken["what"]
    shorter = ["--max_completion_length", "120000"]  # of which a GPU holds one layer's activations
    close = found(*shorter)["training memory"]["mend"]
    assert "GB of the machine's memory or `sp_size: 2` and `--acc" in close
    layers = re.search(r"take `gradient_checkpointing_layers: (\d)` or `activation_offloading: true`, which", close)[1]
    for options in (["--gradient_checkpointing_layers", layers], ["--activation_offloading", "true"]):
        assert found(*shorter, *options)["training memory"]["status"] == "ok"
    assert "`sp_size: 8` does not divide 7" in str(found("--sp_size", "8", "--num_processes", "7")["processes"])
    assert "cannot be trained with DeepSpeed" in str(found("--sp_size", "2", "--accelerate_config", "zero3"))
    alone = found("--sp_size", "8")["training memory"]  # of 28 heads
    assert alone["status"] == "fail" and alone["mend"] == "set one of 2, 4, 7, 14, or leave `sp_size` out"


def test_where_nothing_helps_the_memory_that_does_is_named(tmp_path, doctor):
    model_folder(tmp_path / "model", "Qwen3-32B")

    def memory(size, options=""):
        return doctor("--num_processes", 1, "--gpu_memory", size, *options.split())[0]["training memory"]

    named = re.search(r"no option .* GPUs of (\d+) GB, or a smaller model", memory(8)["mend"])[1]
    smallest = f"{ADAPTER} --load_in_4bit true --per_device_train_batch_size 1 --gradient_accumulation_steps 168"
    assert memory(named, smallest)["status"] == "ok" != memory(int(named) - 2, smallest)["status"]


def test_layers_of_an_adapter_that_peft_does_not_know_are_named(tmp_path, doctor):
    config = build_hybrid("qwen3.5 moe").config.to_dict() | {"vocab_size": 10**6, "hidden_size": 2048}
    model_folder(tmp_path / "model", "Qwen3-32B")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))

    def found(*options):
        return doctor("--num_processes", 1, "--gpu_memory", 40, "--accelerate_config", "zero3", *options)[0]

    words = "an adapter (`use_peft: true` and `lora_target_modules: all-linear`)"
    assert words in found()["training memory"]["mend"]
    assert "The adapter cannot be made" in found("--use_peft", "true")["model"]["what"]


WRITTEN = {
    "H100": ["h100", "NVIDIA H100 80GB HBM3", "gpu_1x_h100_sxm5"],
    "A100-40GB": ["NVIDIA A100-SXM4-40GB"],
    "A100-80GB": ["NVIDIA-A100-SXM4-80GB", "80GB A100", "A100_80GB_PCIe"],
    "RTX-4090": ["rtx4090", "RTX 4090"],
    "RTX-3090": ["NVIDIA GeForce RTX 3090"],
    "RTX-A6000": ["NVIDIA RTX A6000"],
    "L40S": ["l40s"],
    "L4": ["L4"],
    "GH200": ["NVIDIA GH200 480GB"],
    "MI300X": ["AMD Instinct MI300X"],
}
NEAREST = {
    "'H100'": ["H10", "H1000", "H100abc", "h100x"],
    "'L4'": ["4", "L4x2"],
    "'A100-40GB' or 'A100-80GB'": ["A100", "NVIDIA A100-SXM4-64GB"],
    "'RTX-4090'": ["RTX4090D"],
    "'RTX-5090'": ["rtx 5080"],
    "": ["T4", ""],
}


def test_a_gpu_is_known_however_it_is_written():
    found = {name: {GPU.named(each).name for each in written} for name, written in WRITTEN.items()}
    assert found == {name: {name} for name in WRITTEN}


@pytest.mark.parametrize(
    ("nearest", "name"), [(nearest, each) for nearest, names in NEAREST.items() for each in names]
)
def test_an_unknown_gpu_is_told_the_nearest_and_those_known(nearest, name):
    with pytest.raises(ConfigError) as refused:
        GPU.named(name)
    near = f"; the nearest is {nearest}: " if nearest else ": "
    begins, ends = f"The GPU {name!r} is unknown{near}give one of H100, ", ", or its memory, as `--gpu_memory 48`"
    assert str(refused.value).startswith(begins) and ends in str(refused.value)


# Memory


def stepped(model, dtype: torch.dtype) -> int:
    """Bytes of weights, gradients and moments after a step of AdamW."""
    model = model.to(dtype)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.float().mean().backward()
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return sum(one.numel() * one.element_size() for one in (*model.parameters(), *(t.grad for t in trained), *moments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_those_that_torch_holds(dtype):
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    planned = Shape.of(model.config).states(Precision(dtype.itemsize, dtype.itemsize), COPIES, 1)
    assert planned == pytest.approx(stepped(model, dtype), rel=0.05)


def test_states_of_an_adapter_are_those_that_torch_holds(tokenizer):
    model, settings = build_model(tokenizer), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    shape = Shape.of(model.config, settings)
    assert 0 < shape.adapter < shape.parameters / 4
    held = stepped(get_peft_model(model, settings), torch.float32)
    assert shape.states(Precision(4.0, 4), COPIES, 1) == pytest.approx(held, rel=0.05)
    assert shape.states(HALF, Sharding("three", 3), 4) == (2 * shape.parameters + 16 * shape.adapter) / 4


@pytest.mark.parametrize(("nested", "gigabytes"), [(False, 6.17), (True, 5.86)])
def test_a_quantised_model_keeps_embedding_and_head_whole(seven, nested, gigabytes):
    shape = Shape.of(seven, LoraConfig(r=16, target_modules="all-linear"))
    assert shape.parameters - shape.linear == pytest.approx(2 * shape.vocabulary * shape.hidden, rel=1e-3)
    precision = Precision(2.0, 2, quantised=four_bit(nested))
    assert shape.states(precision, COPIES, 1) / GB == pytest.approx(gigabytes, abs=0.02)


@pytest.mark.parametrize("kind", ["gemma 4", "qwen3.5", "lfm2", "falcon h1", "mamba 2"])
def test_keys_and_values_are_those_that_the_model_keeps(kind):
    """Of all of its layers: heads of several sizes, layers that share those of others, and layers with a state."""
    model = build_random(kind) if kind == "gemma 4" else build_hybrid(kind)
    cache = model(torch.arange(8)[None], use_cache=True, return_dict=True)
    cache = cache.get("past_key_values", cache.get("cache_params"))
    kept = [one for layer in cache.layers for one in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    assert Shape.of(model.config).kept == sum(one.numel() for one in kept if one is not None) / 8


def test_a_model_that_hears_is_planned_with_what_it_hears_with():
    model = SOUND_FAMILIES["qwen2-audio"]()[1]
    model.config.architectures = [type(model).__name__]
    assert Shape.of(model.config).parameters == sum(each.numel() for each in model.parameters())


def test_less_is_held_the_more_is_spread(shape):
    assert shape.states(HALF, Sharding("", 2), 8) > shape.states(HALF, Sharding("", 3), 8)
    assert shape.states(HALF, Sharding("", 2, offloads_optimizer=True), 8) == 4 * shape.parameters
    assert shape.states(Precision(2.0, 2, moment=1.0), COPIES, 1) == 6 * shape.parameters
    whole = Sharding("", 3, offloads_weights=True, offloads_optimizer=True)
    assert shape.states(HALF, whole, 8) < shape.states(HALF, Sharding("", 3), 8)
    assert shape.gathered(HALF, Sharding("", 3)) > shape.gathered(HALF, COPIES) == 0
    assert shape.head(49_152, 2, 2**28) < shape.head(49_152, 2, None)  # in chunks


def test_groups_near_the_root_of_the_layers_keep_least(shape):
    held = {size: shape.activations(51_552, 2, True, size) for size in range(1, 40)}
    assert shape.layers == 28 and min(held, key=held.get) in (4, 5, 6)
    assert held[5] - held[1] == (6 + 4 - 28) * shape.input_of_layer(51_552, 2) and held[28] == held[39] == held[1]
    assert shape.activations(51_552, 2, True, offloading=True) < held[5]
    assert held[1] == shape.activations(51_552, 2, True) < shape.activations(51_552, 2, False)
    assert (recomputed(True, 1), recomputed(True, 2), recomputed(False, 1)) == (pytest.approx(4 / 3), 1.5, 1)


@pytest.mark.parametrize(
    ("kind", "content", "expected"),
    [
        ("NO", {}, (0, False, False)),
        ("DEEPSPEED", {"zero_stage": 1}, (1, False, False)),
        ("DEEPSPEED", {"zero_stage": 3, "offload_param_device": "cpu"}, (3, False, False)),
        ("DEEPSPEED", {"deepspeed_config_file": "zero.json"}, (3, True, False)),
        ("FSDP", {"fsdp_sharding_strategy": "NO_SHARD"}, (0, False, False)),
        ("FSDP", {"fsdp_version": 2, "fsdp_activation_checkpointing": True}, (3, False, True)),
        ("FSDP", {"fsdp_offload_params": True}, (3, True, False)),
    ],
)
def test_accelerate_configurations_are_read(tmp_path, monkeypatch, kind, content, expected):
    monkeypatch.chdir(tmp_path)
    zero = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    Path("zero.json").write_text(json.dumps(zero))
    whole = {"distributed_type": kind, "num_processes": 2, **({f"{kind.lower()}_config": content} if content else {})}
    Path("own.yaml").write_text(yaml.safe_dump(whole))
    found = Sharding.read("own.yaml")
    assert (found.stage, found.offloads_optimizer, found.checkpoints) == expected


UNREADABLE = "{distributed_type: DEEPSPEED, deepspeed_config: {deepspeed_config_file: none}}"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: [", "is not valid YAML"),
        ("- a", "is no mapping of options"),
        (UNREADABLE, "cannot be read"),
        (UNREADABLE.replace("none", "list.json"), "cannot be read"),
        ("{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: auto}}", "cannot be read"),
        ("{distributed_type: FSDP, fsdp_config: [a]}", "cannot be read"),
        (None, "the nearest is 'zero3'"),
    ],
)
def test_a_wrong_accelerate_configuration_is_refused(tmp_path, monkeypatch, content, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "own.yaml").write_text(content or "")
    with pytest.raises(ConfigError, match=said):
        Sharding.read("zeroo3" if content is None else str(tmp_path / "own.yaml"))


def test_sampling_ahead_without_a_server_takes_a_copy(shape):
    def parts(copied):
        return Load(shape, HALF, 1, 1, 1, 200, 1024, 2048, True, None, False, 8, copied, True, 1).parts(COPIES)

    alone, ahead = parts(False), parts(True)
    assert ahead.pop("copy that samples") == 2 * shape.parameters + 8 * 1224 * shape.kv_bytes(2)
    assert alone.pop("sampling beyond training") == 0 and alone == ahead


def test_a_teacher_beside_the_policy_takes_memory(tmp_path, doctor):
    model_folder(tmp_path / "model", "Qwen2.5-7B")
    teacher = model_folder(tmp_path / "teacher", "Qwen3-1.7B")

    def taken(given, *options, ranks=7, sharding="zero3"):
        where = (
            "--num_processes",
            ranks,
            "--gpu_memory",
            80,
            "--accelerate_config",
            sharding,
            *options,
            "--temperature",
            1,
        )
        return doctor(*where, "--teacher", given if isinstance(given, str) else json.dumps(given))[1]["training"].get(
            "bytes of teacher"
        )

    weights = 2 * Shape.of(AutoConfig.from_pretrained(teacher)).parameters
    assert taken(teacher) == weights / 7 and taken(teacher, sharding="zero2") == weights
    assert taken({"model": "b", "server": "http://127.0.0.1:1"}) is None
    assert taken({"model": "self", "sees": ["answer"], "teacher_model_kind": "live"}) is None
    mean = {"model": "self", "sees": ["answer"]}
    seven = Shape.of(AutoConfig.from_pretrained(tmp_path / "model")).parameters
    activations = doctor("--num_processes", 7, "--gpu_memory", 80)[1]["training"]["bytes of activations"]
    assert taken(mean, sharding="fsdp2") == 4 * seven / 7
    assert taken(mean, sharding="zero2") == 4 * seven + max(0, 2 * seven - activations) > 4 * seven
    adapter = taken(mean, "--use_peft", "true", sharding="fsdp2", ranks=1)
    assert 0 < adapter < taken(mean, sharding="fsdp2", ranks=1) / 10


# Seconds


def test_more_gpus_serve_faster(shape):
    def seconds(conversations, at_once):
        return _server_seconds(shape, _speed_of(None), _Lengths(3.0, 500.0, 900.0), conversations, at_once, 2, 1)

    assert seconds(168, 168) < seconds(336, 336) < seconds(336, 100)
    assert _assumed_lengths(100, 4, 48, 320) == _Lengths(3.0, 72.0, 260.0)


def test_a_step_takes_less_where_batches_are_sampled_ahead():
    assert [_Step(4.0, 3.0, 2.0, staleness).total for staleness in (0, 1, 2, 4)] == [9.0, 4.5, 3.0, 2.0]
    assert [_Step(4.0, 3.0, 2.0, staleness, shared=True).total for staleness in (0, 1, 2)] == [9.0, 6.0, 6.0]
    assert (_Step(1.0, 2.0, 3.0).scaled(2.0).total, _Step(4.0, 3.0, 2.0, 1).scaled(2.0).total) == (12.0, 9.0)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, "What is it"),
        ({"enum": ["x", "y"]}, "x"),
        ({"type": "integer", "minimum": 3}, 3),
        ({"type": ["number", "null"]}, 1),
        ({"type": "boolean"}, False),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [1, 1]),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 10**15}, [1] * 100),
        ({"type": "object", "properties": {"b": {"const": 7}}, "required": ["b"]}, {"b": 7}),
        ({"anyOf": [{"type": "integer", "default": 5}, {"type": "null"}]}, 5),
        (True, "What is it"),
    ],
)
def test_arguments_are_made_from_schema_and_row(schema, expected):
    row = {"prompt": [{"role": "user", "content": "What is it"}], "answer": "Lima"}
    properties = {"a": schema, "answer": {"type": "string"}, "more": {}}
    made = _made_arguments({"type": "object", "properties": properties, "required": ["a", "answer"]}, row)
    assert made == {"a": expected, "answer": "Lima"}


# The command


def test_the_command_prints_a_line_for_each_finding(recipe, capsys, prints):
    out = prints("doctor", *recipe(max_completion_length=64, call_protocol="learnt_tags"))
    *findings, verdict = [line for line in out.splitlines() if not line.startswith(" ")]
    found = {line[6 : 6 + checks._WIDTH].strip(): line for line in findings}
    assert set(found) == {*checks.CHECKS, *PLAN} - {"sandbox", "server memory"} and verdict.startswith(
        "nothing stands"
    )
    assert all(line.startswith("ok ") for line in findings)
    assert "calculator(expression='1 + 1')" in found["tools"] and "an estimate, for this CPU" in found["step"]
    assert main(["doctor", *recipe(per_device_train_batch_size=12)]) == 1
    assert "fail  rows" in (out := capsys.readouterr().out) and "1 of these must be mended" in out.splitlines()[-1]


def test_the_command_prints_json(recipe, capsys):
    assert main(["doctor", *recipe(max_completion_length=64), "--json", "--num_processes", "3"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] is False and printed["plan"]["training"]["processes"] == 3
    assert {one["status"] for one in printed["findings"]} >= {"ok", "fail"}
