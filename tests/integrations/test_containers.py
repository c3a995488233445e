"""Containers of runs and images of tasks, with a program in the engine's place that writes down what it is asked."""

import json
import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mt_grpo.app.commands import env
from mt_grpo.errors import ConfigError
from mt_grpo.integrations.harbor import containers
from mt_grpo.integrations.harbor.containers import (
    OWNER,
    PROJECT,
    _Image,
    get_images,
    no_way_here,
    owner,
    write_overlay,
)

ENGINE = r"""#!/bin/bash
# its state is what it has, a file each: KIND-NAME.json, the names in KIND.LABEL, and image.NAME
cd {place}; echo "$@" >> asked; [ ! -e broken ] || {{ echo "$(cat broken)"; echo "$(cat broken)" >&2; exit 1; }}
case "$1 $2" in
  *" inspect") kind=$1; shift 2; [ "$kind" != image ] || [ -e "image-$1.json" ] || exec test -e "image.${{1//\//_}}"
    echo "[$(for name; do cat "$kind-$name.json"; echo; echo ,; done | sed '$d')]";;
  run*) bash -c "${{@: -1}}" 2>&1;;
  build*) sleep 0.2; [ ! -e "${{@: -1}}/fails" ] || {{ echo "no such base"; exit 2; }}; touch "image.${{3//\//_}}";;
  pull*) echo "registry cannot be reached"; exit 2;;
  *" ls") label=$(echo "$@" | sed "s/.*label=\([^ ]*\).*/\1/"); cat "$1.${{label}}" 2> e || true;;
esac
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A podman that has nothing; files in the folder say what it has, and `asked` what it was asked."""
    place = tmp_path / "engine"
    place.mkdir()
    program = place / "podman"
    program.write_text(ENGINE.format(place=place))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:/bin:/usr/bin")
    monkeypatch.setattr(containers, "_here", set())
    return place


def asked(engine, word):
    path = engine / "asked"
    return [line for line in path.read_text().splitlines() if word in line] if path.exists() else []


def of(context, name):
    context.mkdir(exist_ok=True, parents=True)
    return _Image(f"localhost/mt-grpo:{name}", context.parent, 30.0, context)


def test_each_image_is_built_once_and_says_so(engine, tmp_path, capfd):
    wanted = [of(tmp_path / name / "environment", name) for name in "abc"]
    (engine / f"image.{wanted[2].name.replace('/', '_')}").touch()
    get_images("podman", [*wanted, *wanted])
    get_images("podman", wanted)
    assert len(asked(engine, "build")) == 2 and len(asked(engine, "inspect")) == 3
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2 and all(
        re.fullmatch(r"Image \d of 3: [ab], \d+ s(, 0:00:\d\d left)?", line) for line in said
    )


@pytest.mark.parametrize(("host", "fault"), [("127.0.0.1", None), ("nowhere.invalid", "nowhere.invalid")])
def test_the_way_from_a_container_is_tried(engine, host, fault):
    found = no_way_here("podman", "localhost/mt-grpo:a", host)
    assert found == fault or fault in found
    (line,) = asked(engine, "run")
    assert "--add-host host.docker.internal:host-gateway --entrypoint bash localhost/mt-grpo:a -c timeout 10 b" in line


def test_an_image_that_several_want_at_once_is_built_once(engine, tmp_path):
    image = of(tmp_path / "task" / "environment", "shared")
    with ThreadPoolExecutor(3) as pool:
        took = list(pool.map(image.get, ["podman"] * 3))
    assert len(asked(engine, "build")) == 1 and sorted(seconds is None for seconds in took) == [False, True, True]


def test_no_lock_of_an_image_is_in_another_users_folder(engine, tmp_path, monkeypatch):
    stranger = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: stranger)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    image, mine = of(tmp_path / "task" / "environment", "a"), tmp_path / "mine"
    mine.write_text("mine")
    theirs = tmp_path / f"mt-grpo-images-{stranger}"
    theirs.mkdir()
    (theirs / image.name.replace("/", "_")).symlink_to(mine)
    with pytest.raises(ConfigError, match="is another user's"):
        image.get("podman")
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    ("built", "said"),
    [
        (
            True,
            r"The image of the task \S+/task cannot be built: no such base\nMend \S+/environment/Dockerfile, or take",
        ),
        (False, r"The image of the task \S+/task cannot be pulled: registry cannot be reached\nMend \S+/task.toml"),
    ],
)
def test_an_image_that_cannot_be_made_is_a_sentence(engine, tmp_path, built, said):
    image = of(tmp_path / "task" / "environment", "broken")
    (image.context / "fails").touch()
    if not built:
        image = _Image("example.com/some:1", image.task, 30.0)
    with pytest.raises(ConfigError, match=said):
        get_images("podman", [image])


GONE = f"{os.uname().nodename}/999999999/1"


@pytest.fixture(params=["docker", "podman"])
def has(engine, request):
    """A killed run's container with network, service, volume and copy, a network alone, and a container of ours."""
    dead, mine = {OWNER: GONE, PROJECT: "dead"}, {OWNER: owner(), PROJECT: "mine"}
    docker = request.param == "docker"
    found = [
        *(("container", name, {PROJECT: "dead"} | label) for name, label in (("dead-main", dead), ("dead-redis", {}))),
        ("container", "mine-main", mine),
        ("network", "dead_default", dead),
        ("network", "alone", {OWNER: GONE}),
        ("volume", "dead_data", {PROJECT: "dead"}),
        ("image", "1234", {OWNER: GONE, "words": "a=b,c"}),
        ("image", "untagged", {OWNER: GONE}),
    ]
    for kind, name, labels in found:
        told = {"Name": f"/{name}" if docker else name, "Config": {"Labels": labels}}
        if kind == "image":
            told = {"Id": name, "RepoTags": ["mt-grpo:copy"] * (name == "1234"), "Config": {"Labels": labels}}
        elif kind != "container":
            told = {"Name": name, "Labels": labels} if docker or kind == "volume" else {"name": name, "labels": labels}
        (engine / f"{kind}-{name}.json").write_text(json.dumps(told))
        for label in (OWNER,) * (OWNER in labels) + tuple(
            f"{PROJECT}={labels[PROJECT]}" for _ in labels.get(PROJECT, "")[:1]
        ):
            with (engine / f"{kind}.{label}").open("a") as names:
                names.write(f"{name}\n")
    return engine


DEAD = [
    *("container dead-main", "container dead-redis", "network dead_default", "volume dead_data", "network alone"),
    *("image mt-grpo:copy", "image untagged"),
]


@pytest.mark.parametrize(("flags", "more"), [([], []), (["--all"], ["container mine-main"])])
def test_clean_removes_what_ended_runs_left(has, capsys, flags, more):
    assert env(["--clean", *flags]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert sorted(printed) == sorted(f"removed {what}" for what in DEAD + more)
    assert len(asked(has, " rm ")) == len(printed)


def test_clean_says_where_there_is_nothing_to_do(engine, capsys, monkeypatch):
    assert env(["--clean"]) == 0 and capsys.readouterr().out == "Nothing was left.\n"
    (engine / "broken").write_text("its service is down")
    with pytest.raises(ConfigError, match="podman does not list what it has: its service is down"):
        env(["--clean"])
    (engine / "docker").write_text("#!/bin/bash\n")
    (engine / "docker").chmod(0o755)
    assert env(["--clean"]) == 0
    assert capsys.readouterr() == (
        "Nothing was left.\n",
        "mt-grpo: podman does not list what it has: its service is down\n",
    )
    monkeypatch.setenv("PATH", str(Path(engine, "nowhere")))
    with pytest.raises(ConfigError, match="`mt-grpo env --clean` needs docker or podman, and neither is installed"):
        env(["--clean"])
    with pytest.raises(ConfigError, match="`mt-grpo env` takes `--clean` and `--all` with it; it was given '--al'"):
        env(["--al"])


@pytest.mark.parametrize("through", ["main", "sidecar", None])
@pytest.mark.parametrize("storage", [None, 7])
def test_a_container_is_labelled_and_bounded(tmp_path, through, storage):
    overlay = write_overlay(tmp_path / "overlay.json", through=through, storage_mb=storage)
    told = json.loads(overlay.read_text())
    main = told["services"]["main"]
    assert main["labels"] == told["networks"]["default"]["labels"] == {OWNER: owner()}
    assert main["command"] == ["sh", "-c", "exec sleep 86400"]  # so that it ends without its trainer
    assert main["pids_limit"] == 512 and main.get("ulimits") == (storage and {"fsize": 7 * 2**20})
    named = {name for name, service in told["services"].items() if "extra_hosts" in service}
    assert named == ({through} if through else set())
