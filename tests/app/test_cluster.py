"""What `recipes/cluster` starts on three nodes: the same commands, whoever starts them."""

import json
import os
import signal
import subprocess

import pytest
import yaml
from support.recipes import RECIPES, ROOT
from support.waiting import until

from mt_grpo.app.request import read_request
from mt_grpo.preemption import STATUS
from mt_grpo.servers import expand_addresses

CLUSTER = ROOT / "cluster"
RECIPE = str(next(path for path in RECIPES if path.stem == "gsm8k"))
TELLS = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["TOLD"], "a") as file:
    file.write(json.dumps([os.environ.get("HOST", ""), os.environ["VLLM_API_KEY"], *sys.argv[1:]]) + "\\n")
if sys.argv[1] == "train" and "PREEMPTED" in os.environ:
    import signal

    early = "EARLY" in os.environ
    signal.pthread_sigmask(signal.SIG_UNBLOCK if early else signal.SIG_BLOCK, {signal.SIGUSR1})
    open(os.environ["PREEMPTED"], "a").write("up\\n")
    signal.pause() if early else signal.sigwait({signal.SIGUSR1})
    sys.exit(75)
"""
SCONTROL = """#!/bin/sh
if [ "$1" = requeue ]; then echo "$@" >> "$PREEMPTED"; else printf 'node1\\nnode2\\nnode3\\n'; fi
"""
SRUN = """#!/usr/bin/env bash
trap '' TERM  # what it has started says what it was told
tasks=$SLURM_NTASKS  # Slurm's own srun takes it for --ntasks, too
for word; do
    case $word in
        --nodelist=*) nodes=${word#*=} ;;
        --ntasks=*) tasks=${word#*=} ;;
        --*) ;;
        *) break ;;
    esac
    shift
done
IFS=, read -ra hosts <<< "$nodes"
for ((number = 0; number < tasks; number++)); do
    HOST=${hosts[number % ${#hosts[@]}]} SLURM_PROCID=$number "$@" &
    started+=($!)
done
trap 'kill -USR1 "${started[@]}"' USR1
for one in "${started[@]}"; do
    while kill -0 "$one" 2> /dev/null; do wait "$one"; done
    wait "$one"
    status=$?
done
exit $status
"""
DIFFERS = {"machine_rank", "main_process_ip", "vllm_server_base_url", "output_dir"}
"""Options that name a host, or a folder."""


@pytest.fixture
def shell(tmp_path):
    """Runs a script where `mt-grpo` writes down what it was told; returns what that was, by host or in order."""

    def start(script: list[str], **environment: str) -> subprocess.Popen:
        programs = {"mt-grpo": TELLS, ".venv/bin/mt-grpo": TELLS, "scontrol": SCONTROL, "srun": SRUN}
        for name, text in programs.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TOLD": str(tmp_path / "told")}
        variables |= {"VLLM_API_KEY": "key", **environment}
        return subprocess.Popen(script, cwd=tmp_path, env=variables, start_new_session=True)

    def run(script: list[str], commands: int = 1, **environment: str) -> list[list[str]]:
        assert start(script, **environment).wait() == 0
        told = tmp_path / "told"
        until(lambda: told.read_text().count("\n") >= commands, seen=told.read_text)  # one may be on its way
        return [json.loads(line) for line in told.read_text().splitlines()]

    run.start = start
    return run


JOB = {"SLURM_JOB_NODELIST": "node[1-3]", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "7"}  # as sbatch sets them


def slurm(shell):
    told = shell(["bash", str(CLUSTER / "slurm.sh"), RECIPE], 3, **JOB)
    assert sorted((host, key) for host, key, *_ in told) == [(f"node{number}", "key") for number in (1, 2, 3)]
    commands = {host: words for host, _, *words in told}
    return [commands[f"node{number}"] for number in (1, 2, 3)]


def skypilot(shell):
    _, train, serve = yaml.safe_load_all((CLUSTER / "skypilot.yaml").read_text())
    addresses = {"SKYPILOT_NODE_IPS": "node1\nnode2", "RECIPE": RECIPE}
    for rank in range(train["num_nodes"]):
        shell(["bash", "-c", train["run"]], SKYPILOT_NODE_RANK=str(rank), **addresses)
    told = shell(["bash", "-c", serve["run"]], RECIPE=RECIPE)
    return [words for _, _, *words in told]


def kubernetes(shell):
    _, _, job, server = yaml.safe_load_all((CLUSTER / "k8s.yaml").read_text())

    def words(workload: dict, **variables: str) -> list[str]:
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        assert container["workingDir"] == "/recipe"  # where code and data are that the recipe names
        _, *rest = container["command"] + container["args"]
        for name, value in {"/recipe/recipe.yaml": RECIPE, **variables}.items():
            rest = [word.replace(name, value) for word in rest]
        return [part for word in rest for part in (word.split("=", 1) if word.startswith("--") else [word])]

    ranks = range(job["spec"]["completions"])
    assert server["spec"]["replicas"] == 8  # each in a pod of its own, which comes back
    return [*(words(job, **{"$(JOB_COMPLETION_INDEX)": str(rank)}) for rank in ranks), words(server)]


@pytest.mark.parametrize("nodes", [slurm, skypilot, kubernetes], ids=lambda nodes: nodes.__name__)
def test_two_nodes_train_and_the_third_serves(nodes, shell):
    *train, serve = nodes(shell)
    replicas = [] if nodes is kubernetes else ["--replicas", "8"]
    assert serve == ["serve", "--config", RECIPE, "--vllm_server_host", "0.0.0.0", *replicas]
    requests = []
    for rank, (command, *words) in enumerate(train):
        request = read_request(words, command)
        assert command == "train" and request.own["machine_rank"] == rank and request.own["main_process_ip"]
        assert len(expand_addresses(request.values["vllm_server_base_url"], "servers")) == 8
        requests.append({**request.own, **request.values, "path": request.path})
    first, second = ({name: value for name, value in each.items() if name not in DIFFERS} for each in requests)
    assert first == second
    expected = {"path": RECIPE, "num_processes": 16, "num_machines": 2, "max_restarts": 3, "weight_sync": "http"}
    assert first.items() >= {**expected, "resume_from_checkpoint": "auto", "overwrite_output_dir": True}.items()
    assert first["save_steps"] == 20


@pytest.mark.parametrize(
    ("early", "status", "requeued"),
    [({}, STATUS, "requeue 7\n"), ({"EARLY": "1"}, 128 + signal.SIGUSR1, "")],
    ids=["listens", "too early"],
)
def test_a_job_of_slurm_is_queued_again_before_its_time_limit(shell, tmp_path, early, status, requeued):
    """Slurm signals the batch shell alone; what trains ends with its own status, or that of the shell's waiting."""
    told = tmp_path / "preempted"
    told.touch()
    job = shell.start(["bash", str(CLUSTER / "slurm.sh"), RECIPE], **JOB, PREEMPTED=str(told), **early)
    until(lambda: told.read_text() == "up\nup\n", lambda: job.poll() is None, seen=told.read_text)
    job.send_signal(signal.SIGUSR1)
    try:
        assert job.wait(60) == status and told.read_text() == f"up\nup\n{requeued}"
    finally:
        job.kill()


def test_kubernetes_begins_a_preempted_run_again():
    """A policy for failures needs pods that are never restarted in place."""
    _, _, job, _ = yaml.safe_load_all((CLUSTER / "k8s.yaml").read_text())
    pod, policy = job["spec"]["template"]["spec"], job["spec"]["podFailurePolicy"]["rules"]
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 600
    assert policy[1]["onExitCodes"] == {"containerName": "train", "operator": "In", "values": [STATUS]}
    assert {rule["action"] for rule in policy} == {"Ignore"}
    assert "--enable_jit_checkpoint=true" in pod["containers"][0]["args"]
