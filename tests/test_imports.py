"""Things register themselves under names, where they are defined."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.registered import keep

from mt_grpo.credit import ADVANTAGE_ESTIMATORS, advantage_estimator
from mt_grpo.data import SCHEMAS, DatasetError, dataset_schema, load_rows
from mt_grpo.envs.protocols import PROTOCOLS, call_protocol
from mt_grpo.errors import ConfigError
from mt_grpo.forward.attention import KERNELS, attention_kernel
from mt_grpo.imports import ImportPathError, RegistrationError, Registry, import_file, import_object, need_library
from mt_grpo.rewards import REWARDS, RewardListError, load_rewards, reward
from mt_grpo.tools import tool
from mt_grpo.tools.loading import TOOLS
from mt_grpo.weights.transport import TRANSPORTS, weight_transport

BUILT_IN = [
    (ADVANTAGE_ESTIMATORS, "mt_grpo"),
    (KERNELS, "segment"),
    (PROTOCOLS, "native"),
    (REWARDS, "exact_match_reward_func"),
    (SCHEMAS, "gsm8k"),
    (TOOLS, "wikipedia_search"),
    (TRANSPORTS, "lora"),
]


@pytest.mark.parametrize(("registry", "name"), BUILT_IN, ids=[name for _, name in BUILT_IN])
def test_built_in_things_are_found_without_a_list(registry, name):
    assert name in registry and registry[name] is dict(registry)[name]
    assert list(registry) == sorted(registry) and len(registry) == len(list(registry))


def test_a_module_is_imported_when_a_name_is_looked_up():
    """Importing the tools costs nothing that only one of them needs."""
    loaded = "assert ('bm25s' in sys.modules) =="
    lines = ["import sys", "from mt_grpo.tools import load_tools", f"{loaded} False"]
    code = "\n".join([*lines, "load_tools(['wikipedia_search'])", f"{loaded} True"])
    subprocess.run([sys.executable, "-c", code], check=True)


DECORATORS = [advantage_estimator, attention_kernel, call_protocol, reward, tool, weight_transport]


@pytest.mark.parametrize("decorator", [*DECORATORS, lambda name: dataset_schema(name, columns=())])
@pytest.mark.parametrize("name", [len, "a.b", "a:b", "", None])
def test_a_bare_decorator_and_a_path_are_no_names(decorator, name):
    with pytest.raises(RegistrationError, match="a name of letters, digits, `_` and `-`, in parentheses behind"):
        decorator(name)


THING = """
from test_imports import THINGS

@THINGS.register("one")
def thing():
    return NUMBER
"""

THINGS: Registry = Registry("thing", "mt_grpo.credit")


def test_a_file_replaces_its_own_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "THINGS", Registry("thing", "mt_grpo.credit"))
    monkeypatch.setitem(sys.modules, "test_imports", sys.modules[__name__])
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "things_one.py").write_text(THING.replace("NUMBER", "1"))
    (tmp_path / "things_two.py").write_text(THING.replace("NUMBER", "2"))
    module = import_file(str(tmp_path / "things_one.py"))
    import things_one  # the same file under another name, as `my_agent.look_up` beside a plugin `my_agent.py`

    assert THINGS["one"] is things_one.thing is not module.thing
    with pytest.raises(ValueError, match="The thing 'one' of .*things_two.py has the name of one in .*things_one.py"):
        import_file(str(tmp_path / "things_two.py"))
    assert THINGS["one"]() == 1


def test_a_plugin_is_a_file_and_no_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run_of_a_stranger").mkdir()
    (tmp_path / "run_of_a_stranger" / "__init__.py").touch()
    for name in ("run_of_a_stranger", "run_of_a_stranger.plugin", "plugin.txt"):
        with pytest.raises(ImportPathError, match=f"The plugin '{name}' is no Python file"):
            import_file(name)
    assert "run_of_a_stranger" not in sys.modules


def test_what_a_cell_of_a_notebook_registers_is_replaced():
    things: Registry = Registry("thing", "mt_grpo.credit")
    for number in (1, 2):
        namespace = {"__name__": "a_notebook", "things": things}
        exec(f"@things.register('one')\ndef thing():\n    return {number}", namespace)
    assert things["one"]() == 2


def test_a_plain_function_is_an_outcome_reward_of_its_name(monkeypatch):
    keep(monkeypatch, REWARDS)

    @reward("plain")
    def judge(completions, **columns):
        return [1.0] * len(completions)

    (loaded,) = load_rewards(["plain"], "outcome")
    assert loaded.name == "plain" and loaded.function is judge
    with pytest.raises(RewardListError, match="'plain' is a reward for outcomes"):
        load_rewards(["plain"], "turn")


def test_a_schema_without_a_home_asks_for_a_source(monkeypatch):
    keep(monkeypatch, SCHEMAS)
    dataset_schema("homeless", columns=("question",))(lambda row: {"prompt": row["question"]})
    with pytest.raises(DatasetError, match="published nowhere: name a source of it, as `homeless:rows.jsonl`"):
        load_rows("homeless", "train")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("raise KeyError('a')", "KeyError: 'a' ({file}, line 2, in <module>)."),
        ("raise __import__('mt_grpo.errors').errors.ConfigError('Install it.')", "Install it ({file}, line 2, in "),
        ("raise SystemExit(3)", "SystemExit: 3 ({file}, line 2, in <module>)."),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module' ({file}, line 2, in <mod"),
    ],
    ids=["raises", "refuses", "exits", "missing"],
)
def test_a_file_that_does_not_import_is_told_of_with_its_line(tmp_path, line, told):
    file = tmp_path / "broken.py"
    file.write_text(f"\n{line}\n")
    with pytest.raises(ImportPathError) as refused:
        import_object(f"{file}:solve", what="agent")
    assert f"The agent '{file}:solve' does not import: {told.format(file=file)}" in str(refused.value)


def test_files_whose_paths_spell_alike_are_two(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my").mkdir()
    for file in ("my_agent.py", "my/agent.py"):
        (tmp_path / file).write_text(f"word = {file!r}")
        assert import_object(f"{tmp_path / file}:word") == file


def test_a_file_may_import_what_stands_beside_it(tmp_path, monkeypatch):
    (tmp_path / "beside_of_a_plugin.py").write_text("word = 'Lima'")
    (tmp_path / "plugin.py").write_text("from beside_of_a_plugin import word")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert import_object(f"{tmp_path / 'plugin.py'}:word") == "Lima"


@pytest.mark.parametrize(
    ("text", "why"),
    [(None, "is not installed"), ("import of_another", r"cannot be imported \(No module named 'of_another'\)")],
)
def test_a_library_that_is_missing_or_broken_is_named(tmp_path, monkeypatch, text, why):
    monkeypatch.syspath_prepend(tmp_path)
    if text is not None:
        (tmp_path / "games_of_a_test.py").write_text(text)
    with pytest.raises(ConfigError, match=rf"A game needs `games_of_a_test`, which {why}: `pip install games`"):
        need_library("games_of_a_test", "A game", "games")
