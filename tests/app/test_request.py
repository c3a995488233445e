"""Wrong input is refused with one sentence before torch is imported, and help is printed without it."""

import json
import re
import shlex
import subprocess
import sys

import pytest
from support.recipes import RECIPES, ROOT

from mt_grpo.app.recipe_file import load_schema
from mt_grpo.app.request import check_places, check_writable
from mt_grpo.errors import ConfigError
from mt_grpo.options.values import SYNONYMS, refuse_unknown

HEAVY = {"accelerate", "datasets", "matplotlib", "numpy", "rich", "torch", "transformers", "trl"}

LONG = "n" * 300
FILES = {
    "good.yaml": "model_name_or_path: m\ndataset_name: d\nmax_steps: 5\n",
    "launched.yaml": "model_name_or_path: m\ndataset_name: d\nenv: {WORLD_SIZE: two}\n",
    "empty.yaml": "# nothing\n",
    "list.yaml": "- a\n",
    "broken.yaml": "a: [\n",
    "twice.yaml": "model_name_or_path: m\nmax_steps: 5\ndataset_name: d\nmax_steps: 6\n",
    "deep.yaml": "lr_scheduler_kwargs:\n  min_lr: 1e-4\n  min_lr: 1e-5\n",
    "half.yaml": 'model_name_or_path: "\\ud83d"\n',
    "escaped.yaml": '{"model_name_or_path": "m", "dataset_name": "d", "system_prompt": "\\ud83d\\ude00"}',
    "typo.yaml": "model_name_or_path: m\nlearning_rat: 1\n",
    "far.yaml": "quickness: 1\n",
    "no_model.yaml": "dataset_name: d\n",
    "no_data.yaml": "model_name_or_path: m\n",
    "merged.yaml": (
        "model_name_or_path: m\ndataset_name: d\nlr_scheduler_kwargs: &one {min_lr: 1e-4, power: 2}\n"
        "model_init_kwargs: {<<: *one, power: 3}\n"
    ),
    "variable.yaml": "model_name_or_path: m\ndataset_name: d\nenv: {1: 2, a=b: 3}\n",
    "folder/inside.yaml": "",
    "no_recipes/text.txt": "",
    "latin.yaml": None,
}
NO_YAML = [
    "[a]: 1",
    "a: {[b]: 1}",
    "a: !!map [b]",
    "a: 2020-13-45",
    f"a: {'1' * 5000}",
    f"a: {'[' * 3000}",
    "a: &x [*x]",
    "a: \0",
]
FILES |= {f"no_yaml{number}.yaml": text for number, text in enumerate(NO_YAML)}
"""Files that PyYAML reads with an error of another kind, and one whose list holds itself."""

VALUES = {
    "max_steps: [50]": "is [50], a list: it takes a whole number.",
    "max_steps: many": "is 'many': it takes a whole number.",
    "max_steps: 1.5": "is 1.5: it takes a whole number.",
    "max_steps: true": "is true: it takes a whole number.",
    "max_steps: 5000000000": "is beyond 4294967295: give a smaller number.",
    f"learning_rate: {'1' * 400}": "is beyond 4294967295: give a smaller number.",
    f"reward_weights: [0.5, 0x{'1' * 5000}]": "is beyond 4294967295: give a smaller number.",
    "max_steps:": "is empty: give it a whole number, or leave it out.",
    "learning_rate: {start: 1}": "is {'start': 1}, a mapping: it takes a number.",
    "use_cpu: 3": "is 3: it takes true or false.",
    "system_prompt: 5": "is 5: it takes text, so put it in quotes.",
    "save_strategy: no": "is false, as YAML reads `no` and `off`: it takes text, so put it in quotes.",
    "run_name: 2026-01-02": "is 2026-01-02: it takes text, so put it in quotes.",
    "column_mapping: [prompt]": "is ['prompt'], a list: it takes a mapping or text.",
    "reward_weights: [1, high]": "is [1, 'high']: it takes a list, each item a number.",
    "turn_reward_funcs: [3]": "is [3]: it takes a list, each item text or a mapping.",
    "tools: {a: b}": "is {'a': 'b'}, a mapping: it takes a list or text.",
}
"""A line of a recipe, and what is said of it."""

TWO = "Two recipes are given, 'good.yaml' and 'typo.yaml': leave one out."
NONE = (
    "No recipe is given: write `mt-grpo train RECIPE.yaml`, or name at least `--model_name_or_path` and "
    "`--dataset_name`."
)
REFUSED = {
    "train variable.yaml": "`env` in variable.yaml sets a variable that no system takes: ",
    **{f"train no_yaml{n}.yaml": f"The recipe 'no_yaml{n}.yaml' is not valid YAML: " for n in range(len(NO_YAML))},
    "doctor good.yaml --gpu_memory nan": "`--gpu_memory` is nan: it takes a number from 1 on.",
    "train good.yaml --model_name_or_path ~nobody_here/m": "The model '~nobody_here/m' cannot be loaded: there is no",
    "train good.yaml --dataset_name ~nobody_here/d.jsonl": "There is no file or folder '~nobody_here/d.jsonl'",
    "train good.yaml --per_device_train_batch_size 100000000 --num_generations 7": "`num_generations: 7` does not div",
    "trian": "the command 'trian' is unknown; the commands are ",
    "train gsm8k.yaml": "The recipe 'gsm8k.yaml' does not exist; one of that name ships with the package:",
    "serve good.yaml": "The recipe's trainer samples from its own model and would leave a server alone: set",
    "train good.yaml --num_generations 3": "`num_generations: 3` does not divide the generation batch of 8 (8 a",
    "train good.yaml --per_device_train_batch_size 0": "`per_device_train_batch_size` is 0; set a number above 0, or",
    "train good.yaml --learning_rate -1": "`learning_rate` is -1.0; set 0 or more, such as 1e-6.",
    "train good.yaml --top_p 2": "`top_p` is 2.0; set a number above 0 and at most 1, or leave it out.",
    "train good.yaml --output_dir good.yaml/run": "`output_dir: good.yaml/run` cannot be a folder, since ",
    "train good.yaml --dataset_name rows.jsonl": "There is no file or folder 'rows.jsonl' (the current folder is ",
    "train good.yaml --dataset_name triviaqa:./rows": "There is no file or folder './rows' (the current folder is ",
    "train good.yaml --model_name_or_path ./m": "The model './m' cannot be loaded: there is no such folder (from ",
    "train good.yaml --tools mine.py:tool": "The tool 'mine.py:tool' does not import: there is no file 'mine.py'",
    "train good.yaml --tools no_such.tool": "The tool 'no_such.tool' does not import: there is no module 'no_such',",
    "train good.yaml --dry_run=maybe": "`--dry_run` is 'maybe': it takes true or false.",
    "train good.yaml --accelerate_config": "`--accelerate_config` is given without a value",
    "train good.yaml --accelerate_config zero3 --num_processes 0": "`--num_processes` is 0: it takes",
    "train good.yaml --num_processes 2": "`--num_processes` needs `--accelerate_config` beside it",
    "train good.yaml --max_restarts 1": "`--max_restarts` needs `--accelerate_config` beside it",
    "rollout good.yaml --dry_run": "`--dry_run` is an option of `mt-grpo train`, not of `mt-grpo rollout`.",
    "recipes": "Write `mt-grpo recipes ls`, or `mt-grpo recipes cp NAME [DEST]`.",
    "recipes list": "Write `mt-grpo recipes ls`",
    "recipes cp": "Write `mt-grpo recipes ls`",
    "recipes cp quikstart.yaml": "The recipe 'quikstart.yaml' is unknown; the nearest is",
    "recipes cp quickstart.yaml no/x": "The recipe cannot be copied to no/x: No such file or directory.",
    "env --all": "`mt-grpo env` takes `--clean` and `--all` with it; it was given '--all'.",
    "completion": "`mt-grpo completion` needs one shell behind it: bash, zsh, fish.",
    "completion fsh": "There is no completion for 'fsh'; the nearest is 'fish': write one of bash, zsh, fish.",
    "schema --out s.json": "`mt-grpo schema` takes no arguments, and '--out' is given.",
    "train": NONE,
    "rollout --num_prompts 2": NONE.replace("train", "rollout"),
    "train folder": "The recipe 'folder' is a folder: give a YAML file in it, such as 'folder/inside.yaml'.",
    "train no_recipes": "The recipe 'no_recipes' is a folder: give a YAML file in it, which holds none.",
    "train god.yaml": "The recipe 'god.yaml' does not exist; the nearest is 'good.yaml'.",
    "train good": "The recipe 'good' does not exist; the nearest is 'good.yaml'.",
    "train folder/insid.yaml": "The recipe 'folder/insid.yaml' does not exist; the nearest is",
    "train nowhere/r.yaml": "The recipe 'nowhere/r.yaml' does not exist.",
    "train --config zzz.yaml": "The recipe 'zzz.yaml' does not exist.",
    "train --config=zzz.yaml": "The recipe 'zzz.yaml' does not exist.",
    "train --config": "`--config` needs the path of a recipe behind it.",
    "train empty.yaml": "The recipe 'empty.yaml' is empty: it needs at least `model_name_or_path`",
    "train list.yaml": "The recipe 'list.yaml' is not a mapping of options to values: write lines",
    "train broken.yaml": "The recipe 'broken.yaml' is not valid YAML: ",
    "train latin.yaml": "The recipe 'latin.yaml' is no text in UTF-8: give a YAML file.",
    "train twice.yaml": "The key 'max_steps' stands in twice.yaml twice, in lines 2 and 4: leave one out.",
    "train deep.yaml": "The key 'min_lr' stands in deep.yaml twice, in lines 2 and 3: leave one out.",
    "train half.yaml": r"The text '\ud83d' in half.yaml, line 1, has half a character.",
    "train typo.yaml": "The key 'learning_rat' in typo.yaml, line 2, is unknown; the nearest is 'learning_rate'.",
    "train far.yaml": "The key 'quickness' in far.yaml, line 1, is unknown: `mt-grpo train --help-all` lists",
    "train no_model.yaml": "The recipe names no model: set `model_name_or_path`.",
    "train no_data.yaml": "The recipe names no dataset: set `dataset_name`.",
    "train good.yaml typo.yaml": TWO,
    "train good.yaml --config typo.yaml": TWO,
    "train --config good.yaml --config=typo.yaml": TWO,
    "train good.yaml --max_steps 5 6": "The word '6' belongs to no option: write `--option value`.",
    "train good.yaml --foo 1": "The option '--foo' is unknown: `mt-grpo train --help-all` lists all that there are.",
    "train good.yaml --model m": "The option '--model' is unknown: here it is `model_name_or_path`.",
    "train good.yaml --lora-rank=8": "The option '--lora-rank' is unknown: here it is `lora_r`.",
    "train good.yaml --learning_rat=1": "The option '--learning_rat' is unknown; the nearest is 'learning_rate'.",
    "train good.yaml -x": "The option '-x' is unknown: options begin with two dashes, as `--max_steps 10`.",
    'train good.yaml --environments \'{"a": {"tool": []}}\'': "The key 'tool' of `environments: a` is unknown; the",
    'train good.yaml --environments \'{"a": {"max_tool_calls": 3}}\'': (
        "The key 'max_tool_calls' of `environments: a` is unknown: here it is `max_env_steps`."
    ),
    'train good.yaml --environments \'{"a": {"system_prompt": 3}}\'': "`environments: a: system_prompt` is 3",
    'train good.yaml --environments \'{"a": {"max_env_steps": 1.5}}\'': "`environments: a: max_env_steps` is 1.5",
    'train good.yaml --env \'{"type": "tools", "tools": 3}\'': "`tools` is 3: it takes a list or text, so put it in",
    'train good.yaml --environments \'{"a": {"lr": 3}}\'': "The key 'lr' of `environments: a` is unknown: it takes",
    "doctor good.yaml --gpu_memory 0": "`--gpu_memory` is 0.0: it takes a number from 1 on.",
    "doctor good.yaml --num_processes none": "`--num_processes` is 'none'",
    "doctor good.yaml --gpu_mem 80": "The option '--gpu_mem' is unknown; the nearest is 'gpu_memory'",
    "doctor good.yaml --dry_run": "`--dry_run` is an option of `mt-grpo train`, not of `mt-grpo doctor`.",
    "doctor good.yaml --max_steps 0": "`max_steps` is 0, so nothing is trained",
    "doctor good.yaml --gpu H10": "The GPU 'H10' is unknown; the nearest is 'H100': give one of H100, ",
    "train good.yaml --num_prompts 3": "`--num_prompts` is an option of `mt-grpo rollout`, not of `mt-grpo train`.",
    "rollout good.yaml --num_prompts 0": "`--num_prompts` is 0: it takes a whole number from 1 on.",
    "eval good.yaml --num_generations 1000001": "`--num_generations` is beyond 1000000: give a smaller number.",
    f"eval good.yaml --num_generations -{'9' * 20}": "`--num_generations` is -99999999999999999999: it takes",
    "rollout good.yaml --num_generations 1e20": "`--num_generations` is '1e20': it takes a whole number from 1 on.",
    f"rollout good.yaml --num_prompts {10**20}": "`--num_prompts` is beyond 4294967295: give a smaller number.",
    f"train good.yaml --num_iterations {10**20}": "`--num_iterations` is beyond 4294967295: give a smaller number.",
    "train good.yaml --max_steps": "`--max_steps` is given without a value: it takes a whole number.",
    "train good.yaml --max_steps=": "`--max_steps` is given without a value: it takes a whole number.",
    "train good.yaml --max_steps --use_cpu": "`--max_steps` is given without a value: it takes a whole number.",
    "train good.yaml --max_steps many": "`--max_steps` is 'many': it takes a whole number.",
    "train good.yaml --max-steps=1.5": "`--max-steps` is '1.5': it takes a whole number.",
    "train good.yaml --use_cpu maybe": "`--use_cpu` is 'maybe': it takes true or false.",
    "train good.yaml --eval_strategy step": "`eval_strategy` is 'step'; the nearest is 'steps': choose one of no,",
    "train good.yaml --loss_type grpoo": "`loss_type` is 'grpoo'; the nearest is 'grpo': choose one of grpo, bnpo, ",
    "train good.yaml --max_env_steps -1": (
        "`max_env_steps` is -1; it counts replies of the environment, so set 0 or more."
    ),
    "train good.yaml --temperature 0": "`temperature: 0.0` cannot be trained, since log-probs are those of the",
    "rollout good.yaml --temperature -1": "`temperature` is -1.0; set a number above 0, such as 1.0.",
    "train good.yaml --forward trees": "`forward` is 'trees'; the nearest is 'tree': choose one of tree, padded, turn",
    "train good.yaml --weight_sync nccll": "`weight_sync` is 'nccll'; the nearest is 'nccl': choose one of auto,",
    "train good.yaml --call_protocol nativ": "`call_protocol` is 'nativ'; the nearest is 'native': choose one of",
    "train good.yaml --advantage_estimator mtgrpo": "`advantage_estimator` is 'mtgrpo'; the nearest is 'mt_grpo'",
    "train good.yaml --advantage_estimator '{\"name\": 1}'": "`advantage_estimator` is {'name': 1}: give the name of",
    "train good.yaml --tools calculater": "There is no built-in tool 'calculater'; the nearest is 'calculator': use",
    'train good.yaml --turn_reward_funcs step_reward \'{"name": "information_gan"}\'': (
        "The turn reward 'information_gan' is neither a built-in name nor a path such as"
    ),
    'train good.yaml --turn_reward_funcs \'{"name": "mine.py:Mine", "limit": 3}\'': (
        "The turn reward 'mine.py:Mine' does not import: there is no file 'mine.py' (from "
    ),
    'train good.yaml --outcome_reward_funcs \'{"column": "a"}\'': "The reward {'column': 'a'} has no name: give the",
    "train good.yaml --reward_weights 1.0 nan": "`reward_weights` is [1.0, nan]; give a list of finite numbers",
    "train good.yaml --lora_dropout 2": "`lora_dropout` is 2.0; set a number from 0 to 1, or leave it out.",
    "train good.yaml --seed -1": "`seed` is -1; set a whole number from 0 to 4294967295.",
    f"eval good.yaml --tools {LONG}.py:a": f"{LONG[:60]!r}... is too long for the name of a file.",
    "train launched.yaml": "The environment variable WORLD_SIZE is 'two', and launchers set it to a number: unset ",
    "train good.yaml --turn_advantage_coef nan": "`turn_advantage_coef` is nan; give a finite number.",
    "train good.yaml --max_prompt_length 512": "The option '--max_prompt_length' is unknown: prompts are never",
    "train good.yaml --outcome_reward_funcs accuracy_reward": (
        "The outcome reward 'accuracy_reward' is neither a built-in name nor a path such as `package.module.name`: "
        "TRL's is `trl.rewards.accuracy_reward`."
    ),
    "train good.yaml --turn_reward_funcs exact": "The turn reward 'exact' is neither a built-in name nor a path such",
    **{f"train value{n}.yaml": f"in value{n}.yaml, line 3, {said}" for n, said in enumerate(VALUES.values())},
}
"""A command line, and the sentence that refuses it, or its beginning."""

ACCEPTED = [
    ["good.yaml"],
    ["--config", "good.yaml"],
    ["--config=good.yaml"],
    ["--learning_rate", "2e-3", "good.yaml", "--use-cpu"],
    ["good.yaml", "--learning_rate=2e-3", "--no_gradient_checkpointing", "--tools", "calculator", "wikipedia_search"],
    ["--tools", "calculator", "good.yaml"],
    ["--use_cpu", "good.yaml", "--max_completion_length=600", "--max_turn_length", "600"],
    ["--model_name_or_path", "m", "--dataset_name", "d", "--report_to", "none"],
    ["good.yaml", "--external_plugins", "plugin.py", "--call_protocol", "of_the_plugin", "--tools", "of_it"],
    ["good.yaml", "--env", "mine.py:Env", "--call_protocol", "of_its_module"],
    ["good.yaml", "--tools", "mine.py:tool", "--outcome_reward_funcs", "registered_by_mine"],
    ["good.yaml", "--resume_from_checkpoint", "true", "--column_mapping", '{"prompt": "question"}'],
    ["good.yaml", "--turn_reward_funcs", "step_reward", '{"name": "information_gain", "gain": "probability"}'],
    ["good.yaml", "--teacher", "{model: self, teacher_model_kind: base}", "--distillation_coef=1e-1"],
    ["good.yaml", "--advantage_estimator", "{name: gtpo, gamma: 9e-1}"],
    ["good.yaml", "--outcome_reward_funcs", "exact_match_reward_func", "{name: mine.py:Exact, column: answer}"],
    ["good.yaml", "--lr_scheduler_kwargs", "{power: 2}", "--system_prompt", "{a: b}"],
    ["merged.yaml"],
    ["escaped.yaml"],
    *([str(recipe)] for recipe in RECIPES),
]

HELP = [
    ["--help"],
    ["train", "--help"],
    ["rollout", "good.yaml", "--help"],
    ["serve", "-h"],
    ["train", "--help-all"],
    ["schema", "--help"],
]

RUN = f"""
import contextlib, io, json, sys
from mt_grpo.app.request import read_request
from mt_grpo.cli import main

refused, accepted, helped = json.load(sys.stdin)
said = []
for arguments in refused:
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        said.append([main(arguments), stream.getvalue()])
read = [read_request(arguments, "train").values for arguments in accepted]
printed = []
for arguments in helped:
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        printed.append([main(arguments), stream.getvalue()])
print(json.dumps([said, read, printed, sorted({HEAVY!r} & set(sys.modules))]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What one process says to all the command lines of this module, and which heavy modules it has imported."""
    folder = tmp_path_factory.mktemp("requests")
    lines = {f"value{n}.yaml": FILES["no_data.yaml"] + f"dataset_name: d\n{line}\n" for n, line in enumerate(VALUES)}
    for name, text in (FILES | lines).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"caf\xe9: 1\n" if text is None else text.encode())
    table = json.dumps([[*map(shlex.split, REFUSED)], ACCEPTED, HELP])
    command = [sys.executable, "-c", RUN]
    run = subprocess.run(command, input=table, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_nothing_heavy_is_imported_to_refuse_or_to_help(answers):
    assert answers[3] == []


def test_names_of_other_trainers_are_told_before_spellings():
    known = load_schema().options
    others = [(own, other) for own, names in SYNONYMS.items() for other in names.split()]
    assert len({other for _, other in others}) == len(others)
    for own, other in others:
        assert own in known and other not in known
        with pytest.raises(ConfigError, match=f"is unknown: here it is `{own}`"):
            refuse_unknown(other.upper().replace("_", "-"), f"The key {other!r}", known)


@pytest.mark.parametrize(("number", "sentence"), enumerate(REFUSED.values()), ids=REFUSED)
def test_wrong_input_is_one_right_sentence(answers, number, sentence):
    status, printed = answers[0][number]
    said = printed.removeprefix("mt-grpo: ").removesuffix("\n")
    if sentence.startswith("in value"):
        said = said.partition(" ")[2]
    assert status == 1 and "\n" not in said
    assert said == sentence if sentence.endswith(".") else said.startswith(sentence)


def test_the_forms_of_an_option_say_the_same(answers):
    taken = answers[1]
    for arguments, values in zip(ACCEPTED, taken, strict=True):
        assert "model_name_or_path" in values and {"dataset_name", "env"}.intersection(values), arguments
    assert taken[0] == taken[1] == taken[2] == {"model_name_or_path": "m", "dataset_name": "d", "max_steps": 5}
    assert taken[3] == taken[0] | {"learning_rate": 2e-3, "use_cpu": True}
    tools = ["calculator", "wikipedia_search"]
    assert taken[4] == taken[0] | {"learning_rate": 2e-3, "gradient_checkpointing": False, "tools": tools}


def test_a_mapping_is_written_as_in_a_recipe(answers):
    taken = {arguments[1]: values for arguments, values in zip(ACCEPTED, answers[1], strict=True) if arguments[1:]}
    assert json.loads(taken["--teacher"]["teacher"]) == {"model": "self", "teacher_model_kind": "base"}
    assert json.loads(taken["--advantage_estimator"]["advantage_estimator"]) == {"name": "gtpo", "gamma": 0.9}
    listed = taken["--outcome_reward_funcs"]["outcome_reward_funcs"]
    assert listed[0] == "exact_match_reward_func"
    assert json.loads(listed[1]) == {"name": "mine.py:Exact", "column": "answer"}
    told = taken["--lr_scheduler_kwargs"]
    assert (told["lr_scheduler_kwargs"], told["system_prompt"]) == ('{"power": 2}', "{a: b}")


def test_a_merged_mapping_may_be_changed(answers):
    (merged,) = (values for values in answers[1] if "model_init_kwargs" in values)
    assert merged["lr_scheduler_kwargs"] == {"min_lr": 1e-4, "power": 2}
    assert merged["model_init_kwargs"] == {"min_lr": 1e-4, "power": 3}


def test_two_escapes_of_json_are_one_character(answers):
    assert [values.get("system_prompt") for values in answers[1]].count("\U0001f600") == 1


def test_the_script_for_accelerate_refuses_as_the_command_does(tmp_path):
    command = [sys.executable, str(ROOT.parent / "scripts" / "train.py"), "--config=zzz.yaml"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (1, "mt-grpo: The recipe 'zzz.yaml' does not exist.\n")


def test_help_is_short_and_names_what_is_ours(answers):
    (_, general), (_, train), (_, rollout), (_, serve), (_, everything), (_, schema_help) = answers[2]
    assert [status for status, _ in answers[2]] == [0] * len(HELP)
    assert all(f"\n  {command} " in general for command in ("train", "rollout", "serve", "schema"))
    schema = json.loads((ROOT.parent / "mt_grpo" / "app" / "schema.json").read_text())["properties"]
    ours = [name for name, option in schema.items() if option["x-owner"] == "mt_grpo"]
    assert ours and all(f"  --{name} " in train for name in ours)
    assert "…" not in train and len(train.splitlines()) < 160 and max(map(len, train.splitlines())) <= 100
    assert "--num_prompts" in rollout and "--num_prompts" not in train
    assert "> recipe.schema.json" in schema_help
    assert "--vllm_server_port" in serve and "--outcome_reward_funcs" not in serve
    assert all(re.search(rf"^  --{name}\s", everything, re.MULTILINE) for name in schema)


RECIPE = {"model_name_or_path": "embedded", "dataset_name": "embedded"}


@pytest.mark.parametrize(
    "folder", ["/proc/x", "/proc/self/x/y", "/sys/x", "/dev/null/x", "/dev/full", "", "a" * 300, "a\0b", "dangling"]
)
def test_a_place_that_takes_no_folder_is_refused(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="`output_dir: .*name another|names no folder|to write to") as caught:
        check_places(RECIPE | {"output_dir": folder}, "train")
    assert "\n" not in str(caught.value) and len(list(tmp_path.iterdir())) == 1


def test_looking_at_a_place_leaves_nothing_there(tmp_path, monkeypatch):
    check_writable(str(tmp_path / "a" / "run"))
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ConfigError, match=f"cannot be written, since {tmp_path} is not yours to write to"):
        check_writable(str(tmp_path / "a" / "run"))
    assert not list(tmp_path.iterdir())


def test_only_what_a_command_needs_is_looked_for(tmp_path):
    values = RECIPE | {"tools": ["no_such.tool"], "dataset_name": "no.jsonl", "output_dir": __file__}
    check_places(values, "serve")
    check_places(RECIPE | {"output_dir": __file__}, "rollout")  # writes nothing
    check_places(RECIPE | {"tools": ["made_by_it.tool"], "external_plugins": ["plugin.py"]}, "train")
    assert not list(tmp_path.iterdir())


def test_one_name_stands_for_a_list_of_one():
    check_places(RECIPE | {"tools": "calculator", "turn_reward_funcs": "mt_grpo.rewards.TurnReward"}, "train")
    with pytest.raises(ValueError, match="there is no module 'no_such'"):
        check_places(RECIPE | {"outcome_reward_funcs": "no_such.reward"}, "rollout")
