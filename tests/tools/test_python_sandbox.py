"""Python for a model: what it prints, what it may not do, what is left of it."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.escapes import HARMFUL, HARMLESS, attempt
from support.loopback import ScriptedServer
from support.waiting import until

from mt_grpo.envs.tool_env import execute_calls
from mt_grpo.errors import ConfigError, UserError
from mt_grpo.tools import Tool, load_tools
from mt_grpo.tools import python_sandbox as module
from mt_grpo.tools.python_sandbox import PythonSandbox, RemotePython, UnconfinedError, _refuse_unconfined
from mt_grpo.trajectory import ToolCall


def unconfined() -> str:
    try:
        _refuse_unconfined()
    except UnconfinedError as error:
        return str(error)
    return ""


confined = pytest.mark.skipif(bool(unconfined()), reason=unconfined())


patient = functools.partial(PythonSandbox, time_limit=60.0)
"""For code that must not run out of time, on a machine that may be busy."""


def run(sandbox: PythonSandbox | RemotePython, *codes: str, timeout: float | None = 120.0) -> list[ToolCall]:
    calls = [ToolCall("python", {"code": code}) for code in codes]
    asyncio.run(execute_calls(calls, {"python": Tool.from_function(sandbox.python)}, timeout))
    return calls


def processes_of(marker: str) -> list[str]:
    """Command lines of the processes that run code with a marker, or confine it."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            folder = os.readlink(path / "cwd")
        except OSError:
            continue
        if marker in folder or marker in command:
            found.append(command)
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where code works; in the end no process works there, and it is empty."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield tmp_path
    until(lambda: not processes_of(str(tmp_path)) and not list(tmp_path.iterdir()))


# What the model sees


@confined
def test_code_returns_what_it_prints():
    sandbox = patient(output_limit=10)
    fine, silent, failed, ended, long, packages, slept = run(
        sandbox,
        "import sys\nprint(sum(range(10)))\nprint('!', file=sys.stderr)",
        "2 + 2",
        "print('before')\n1 / 0",
        "raise SystemExit(3)",
        "print('é' * 1000)",
        "import numpy; print(numpy.linalg.det(numpy.eye(3)))",
        "import asyncio\nprint(asyncio.run(asyncio.sleep(0, 'slept')))",
    )
    assert (fine.result, fine.data) == ("45\n!", {"stdout": "45\n", "stderr": "!\n"})
    assert silent.result == "The code printed nothing: print what you want to see."
    assert failed.result.startswith("Error: CodeError: before\nTraceback ") and failed.error
    [traced] = run(patient(), "x = 1\nx.y")
    assert 'File "main.py", line 2' in traced.error and "AttributeError: 'int' object" in traced.error
    assert ended.error == "CodeError: The code ended with exit code 3."
    assert long.result == "ééééé\n[1,991 of 2,001 bytes were cut off.]"
    assert (packages.result, slept.result) == ("1.0", "slept")


@confined
def test_no_variable_or_file_outlives_a_call():
    first, second = run(
        patient(),
        "x = 1; open('kept', 'w').write('x'); print('done')",
        "import os; print(os.listdir('.'), 'x' in globals())",
    )
    assert (first.result, second.result) == ("done", "['main.py'] False")


@confined
def test_what_is_named_readable_can_be_read_and_not_written(tmp_path):
    (tmp_path / "table.csv").write_text("a,b\n")
    code = f"print(open({str(tmp_path / 'table.csv')!r}).read()); open({str(tmp_path / 'new')!r}, 'w')"
    [call] = run(patient(readable=[str(tmp_path)]), code)
    assert "a,b" in call.error and "PermissionError" in call.error


@confined
def test_a_recipe_names_it_and_the_example_of_the_page_runs():
    [tool] = load_tools(["python"])
    assert (tool.name, tool.is_async, tool.concurrency) == ("python", True, os.cpu_count())
    page = (Path(__file__).parents[2] / "docs" / "python_sandbox.md").read_text()
    namespace: dict = {}
    exec(page.split("```python\n")[1].split("```")[0], namespace)
    assert asyncio.run(namespace["sandbox"]()("print(2 + 2)"))[0] == "4"


@pytest.mark.parametrize("name", ["time_limit", "memory_limit", "disk_limit", "output_limit"])
def test_a_limit_of_nothing_is_refused(name):
    with pytest.raises(ConfigError, match=f"`{name}` of the tool `python` is 0: give more than 0"):
        PythonSandbox(**{name: 0})


# Where it cannot be confined


@pytest.fixture
def untried():
    """As in a process that has not tried yet whether code can be confined."""
    _refuse_unconfined.cache_clear()
    yield
    _refuse_unconfined.cache_clear()


def answering(monkeypatch, answer):
    async def answered(request):
        return answer

    monkeypatch.setattr(module, "_ask_host", answered)


def test_without_the_library_it_is_refused_with_the_mend(monkeypatch, untried):
    monkeypatch.setattr(sys, "executable", sys._base_executable)  # a Python without this environment's packages
    with pytest.raises(UserError) as refusal:
        load_tools(["python"])
    said = str(refusal.value)
    assert said.startswith("The tool `python` cannot confine code on this machine (ModuleNotFoundError: ")
    assert said.endswith("install `mt-grpo[sandbox]` on Linux 6.7 or later, or use `RemotePython`.")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"refused": "RuntimeError: sandlock_popen failed"}, "(RuntimeError: sandlock_popen failed)"),
        ({"stdout": "it opens connections\nprobed\n", "stderr": "", "exit_code": 0}, "(it opens connections probed)"),
        ({"stdout": "", "stderr": "", "exit_code": -1, "killed": "time"}, "(time)"),
        ({"stdout": "", "stderr": "no python\n", "exit_code": 127, "killed": None}, "(no python)"),
    ],
)
def test_a_sandbox_that_leaks_or_does_not_start_is_refused(monkeypatch, untried, answer, says):
    answering(monkeypatch, answer)
    with pytest.raises(UnconfinedError) as refusal:
        PythonSandbox()
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"lost": "no answer came"}, "The code was stopped: the process that confines it failed (no answer came)."),
        ({"refused": "no room"}, "The code was not run, since it could not be confined: no room."),
    ],
)
@confined
def test_code_that_may_have_run_is_not_said_not_to_have(monkeypatch, answer, says):
    sandbox = PythonSandbox()
    answering(monkeypatch, answer)
    [call] = run(sandbox, "print(1)")
    assert call.error.endswith(says)


@confined
def test_a_call_that_cannot_be_confined_does_not_run(monkeypatch, tmp_path):
    sandbox = PythonSandbox()
    monkeypatch.setattr(sys, "executable", sys._base_executable)
    [call] = run(sandbox, "print('ran')")
    assert "could not be confined: ModuleNotFoundError" in call.error and "ran" not in call.error


# What it may not do


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """What lies outside: files, sockets, the trainer."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "victim").write_text("secret")
    (folder / "spare").write_text("x" * 10)
    abstract = f"mt-grpo-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as unnamed,
    ):
        unix.bind(str(folder / "socket"))
        unix.listen()
        unnamed.bind(f"\0{abstract}")
        unnamed.listen()
        known = {"victim": str(folder / "victim"), "spare": str(folder / "spare"), "folder": str(folder)}
        yield known | {"abstract": abstract, "port": tcp.getsockname()[1], "trainer": os.getpid()}


@pytest.fixture(scope="module")
def outcomes(world):
    os.environ["MT_GRPO_SECRET"] = "secret"
    [call] = run(patient(), attempt(HARMLESS | HARMFUL, **world))
    del os.environ["MT_GRPO_SECRET"]
    assert not call.error, call.error
    return json.loads(call.result)


@confined
@pytest.mark.skipif(platform.machine() != "x86_64", reason="system calls are tried by their numbers on x86-64")
@pytest.mark.parametrize("act", [*HARMLESS, *HARMFUL])
def test_the_code_stays_inside_when_it(outcomes, act):
    assert outcomes[act] != "done"
    if act in HARMFUL:
        assert outcomes[act].startswith(("PermissionError", "ValueError: not allowed to raise"))


@pytest.mark.skipif(platform.system() != "Linux", reason="the acts are Linux's")
def test_the_same_acts_lead_out_of_an_unconfined_process(world, tmp_path):
    """Else the test above would show nothing."""
    environment = {**os.environ, "MT_GRPO_SECRET": "secret"}
    command = [sys.executable, "-c", attempt(HARMLESS, **world)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True)
    failed = {act: outcome for act, outcome in json.loads(ran.stdout).items() if outcome != "done"}
    assert not failed


CALL_32 = """
import ctypes, mmap
registers = [(0xB8, 359), (0xBB, 2), (0xB9, 1), (0xBA, 0)]  # socket, as a 32-bit program calls it
code = b"".join(bytes([move]) + value.to_bytes(4, "little") for move, value in registers)
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes([0x53]) + code + bytes([0xCD, 0x80, 0x5B, 0xC3]))
number = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
print("opened" if number >= 0 else number)
"""


@confined
@pytest.mark.skipif(platform.machine() != "x86_64", reason="32-bit calls are tried on x86-64")
def test_calls_of_a_32_bit_program_lead_nowhere():
    [call] = run(patient(), CALL_32)
    assert "opened" not in call.result


LIMITS = {
    "an endless loop": ("while True: pass", "longer than 1 s"),
    "a process that ignores signals": (
        "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\ntime.sleep(100)",
        "longer than 1 s",
    ),
    "output without end": ("while True: print('x' * 1000)", "longer than 1 s"),
    "memory": ("x = bytearray(1 << 30)", "more than 256 MiB of memory"),
    "shared memory": ("import mmap; m = mmap.mmap(-1, 1 << 30); m.write(bytes(1 << 28))", "of memory"),
    "memory of many processes": (
        "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        x = bytearray(100 << 20)\n"
        "        time.sleep(0.5); print('had it', flush=True); os._exit(0)\ntime.sleep(0.8); print('end')",
        None,
    ),
    "threads": (
        "import threading, time\nfor _ in range(20000): threading.Thread(target=time.sleep, args=(9,)).start()",
        "of memory|can't start new thread|longer than",
    ),
    "a large file": ("open('x', 'wb').write(bytes(40 << 20))", "File too large|No space left"),
    "many files of some size": (
        "import itertools\nfor n in itertools.count(): open(f'{n}', 'wb').write(bytes(4 << 20))",
        "may write 32 MiB",
    ),
    "very many files": ("for n in range(10**6): open(f'{n}', 'w').close()", "in 2,000 files"),
    "open files": ("files = [open('/dev/null') for _ in range(1000)]", "Too many open files"),
}  # fmt: skip


@pytest.fixture(scope="module")
def small():
    return patient(memory_limit=256, disk_limit=32)


@confined
@pytest.mark.slow
@pytest.mark.parametrize("what", LIMITS)
def test_a_limit_holds_for(small, what):
    code, says = LIMITS[what]
    sandbox = PythonSandbox(time_limit=1.0, memory_limit=256, disk_limit=32) if "longer than 1 s" == says else small
    [call] = run(sandbox, code)
    if says is None:
        assert call.result.count("had it") < 3
    else:
        assert call.error and any(part in call.error for part in says.split("|"))
        assert len(call.error) < 50_000


NESTED = "import os\nfor _ in range({depth}):\n    os.mkdir('d'); os.chdir('d')\n"
HIDDEN = {
    "deleted files": (
        "import os\nkept = []\nfor _ in range(20):\n    kept.append(open('x', 'wb'))\n"
        "    kept[-1].write(bytes(1 << 20)); kept[-1].flush(); os.unlink('x')"
    ),
    "deleted files that are mapped": (
        "import mmap, os\nkept = []\nfor _ in range(20):\n    f = open('x', 'w+b'); f.truncate(1 << 20)\n"
        "    os.unlink('x'); os.posix_fallocate(f.fileno(), 0, 1 << 20); kept.append(mmap.mmap(f.fileno(), 1 << 20))\n"
        "    f.close()"
    ),
    "paths beyond PATH_MAX": NESTED.format(depth=10_000),
    "files beyond PATH_MAX": NESTED.format(depth=1_900)
    + "for n in range(20): open(f'{n}', 'wb').write(bytes(1 << 20))",
    "a folder nobody may list": (
        "import os\nos.mkdir('d', 0o300)\nfor n in range(20): open(f'd/{n}', 'wb').write(bytes(1 << 20))"
    ),
    "links": "import os\nfor n in range(10_000): os.link('main.py', f'{n}')",
    "names": "import os\nfor n in range(10_000): os.symlink('x' * 4_000, f'{n}')",
}  # fmt: skip
"""Ways to have more on the disk than is seen by who walks through the folder."""


@confined
@pytest.mark.parametrize("what", HIDDEN)
def test_the_disk_limit_counts(what, folder):
    [call] = run(patient(disk_limit=8), HIDDEN[what] + "\nprint('had it all')")
    assert "No space left on device" in call.error and "had it all" not in call.error


BUFFERS = """
import socket
pairs = []
try:
    while True:
        pairs.append(socket.socketpair())
        for end in pairs[-1]:
            end.setblocking(False)
            try:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
            except PermissionError:
                pass
            try:
                while True: held += end.send(bytes(65536))
            except BlockingIOError: pass
except OSError:
    print(held >> 20)
"""


@confined
def test_buffers_of_sockets_hold_little():
    [call] = run(patient(), "held = 0" + BUFFERS)
    assert int(call.result) < 32


ELSEWHERE = """
import asyncio, json, sys
from mt_grpo.tools.python_sandbox import PythonSandbox

sandbox = PythonSandbox(time_limit=60.0, disk_limit=8)
for code in json.loads(sys.argv[1]):
    try:
        print(json.dumps(asyncio.run(sandbox.python(code))[0]))
    except Exception as error:
        print(json.dumps(str(error)))
"""


def run_elsewhere(prefix: list[str], *codes: str) -> tuple[list[str], str]:
    """What codes come to in a process with other rights, and what it says on standard error."""
    command = [*prefix, sys.executable, "-c", ELSEWHERE, json.dumps(codes)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()], ran.stderr


ORDINARY = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
WITHOUT_NAMESPACES = [
    "unshare", "--user", "--map-root-user", "sh", "-c",
    "echo 0 > /proc/sys/user/max_user_namespaces && "
    'exec setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin "$@"', "sh",
]  # fmt: skip


def works(*command: str) -> bool:
    try:
        return subprocess.run([*command, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@confined
@pytest.mark.slow
@pytest.mark.skipif(not works(*ORDINARY), reason="user namespaces are not allowed here")
def test_the_limit_holds_for_an_ordinary_user(folder):
    who = "import os; open('x', 'w').write('x'); print(os.getuid(), sorted(os.listdir('.')))"
    told, said = run_elsewhere(ORDINARY, who, HIDDEN["deleted files"], HIDDEN["a folder nobody may list"])
    assert told[0] == "1000 ['main.py', 'x']" and not said
    assert all("No space left on device" in each for each in told[1:])


@confined
@pytest.mark.slow
@pytest.mark.skipif(not works(*WITHOUT_NAMESPACES), reason="namespaces cannot be taken away here")
def test_without_namespaces_code_runs_and_writes_nothing(folder):
    writes = ["open('x', 'w')", "import os; os.mkdir('d')", "open('main.py', 'a')", "import os; os.unlink('main.py')"]
    told, said = run_elsewhere(WITHOUT_NAMESPACES, "print(open('main.py').read())", *writes)
    assert told[0] == "print(open('main.py').read())"
    assert all("PermissionError" in each for each in told[1:])
    assert "can write no file, since this machine allows no mount namespace" in said and said.count("\n") == 1


# What is left of it: nothing

BACKGROUND = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(1000)
    os._exit(0)
print('bye')
"""
OUT_OF_TIME = "CodeError: The code was stopped: it took longer than 1 s."


@confined
@pytest.mark.parametrize(
    ("code", "limits", "said"),
    [
        pytest.param("while True:\n    try: os.fork()\n    except OSError: pass", {}, None, marks=pytest.mark.slow),
        (BACKGROUND, {"time_limit": 60.0}, "bye"),
        ("import time; time.sleep(1000)", {"timeout": 0.5}, "python took longer than 0.5 s."),
        (NESTED.format(depth=1_100) + "while True: pass", {}, OUT_OF_TIME),
    ],
    ids=["fork bomb", "background", "out of the call's time", "deep folders"],
)
def test_nothing_outlives_its_call(folder, code, limits, said):
    limits = {"time_limit": 1.0, "timeout": 120.0} | limits
    [call] = run(PythonSandbox(time_limit=limits["time_limit"]), f"import os\n{code}", timeout=limits["timeout"])
    assert said in (None, call.error, call.result)
    assert said is None or call.seconds < 60.0


TRAINER = """
import asyncio
from mt_grpo.tools.python_sandbox import PythonSandbox
sandbox = PythonSandbox()
print("begun", flush=True)
asyncio.run(sandbox.python("import time; time.sleep(1000)"))
"""


@confined
@pytest.mark.slow
def test_a_killed_trainer_leaves_no_process_and_no_file(folder):
    with subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE) as trainer:
        trainer.stdout.readline()
        until(lambda: processes_of(str(folder)), lambda: trainer.poll() is None)
        trainer.kill()


# A remote sandbox


@pytest.fixture
def server():
    """A server that speaks the protocol, and gives the reply of a function of the request."""
    scripted = ScriptedServer(
        lambda *request: scripted.reply(request[2]) if callable(scripted.reply) else scripted.reply
    )
    yield scripted
    scripted.stop()


def fusion(status="Success", run_status="Finished", code=0, stdout="", stderr=""):
    run = {"status": run_status, "return_code": code, "stdout": stdout, "stderr": stderr, "execution_time": 0.1}
    return 200, {"status": status, "message": "", "compile_result": None, "run_result": run, "files": {}}


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        (fusion(stdout="4\n"), "4"),
        (fusion(stdout="4\n", stderr="careful\n"), "4\ncareful"),
        (fusion(), "The code printed nothing: print what you want to see."),
        (fusion("Failed", code=1, stdout="a\n", stderr="NameError: b\n"), "Error: CodeError: a\nNameError: b"),
        (fusion("Failed", "TimeLimitExceeded", None, "a\n"), "Error: CodeError: a\nThe code was stopped: it took"),
        (fusion("Failed", "Error", None), "Error: CodeError: The code was stopped: Error."),
        ((500, "no"), "failed: HTTPStatusError: Server error '500"),
        ((200, "no JSON"), "failed: JSONDecodeError"),
        ((200, {"other": 1}), "failed: KeyError: 'run_result'"),
        ((200, [1]), "failed: TypeError"),
        (None, "failed: RemoteProtocolError"),
        ((200, {"status": "SandboxError", "message": "no room", "run_result": None}), "did not run the code: no room"),
    ],
)
def test_what_a_server_answers_is_told(server, reply, result):
    server.reply = lambda body: reply
    sandbox = RemotePython(f"{server.url}/run_code", time_limit=2, memory_limit=64, headers={"X-Key": "k"})
    [call] = run(sandbox, "print(2 + 2)")
    assert call.result.startswith(result) if result.startswith("Error") else result in call.result
    request = {"code": "print(2 + 2)", "language": "python", "run_timeout": 2, "memory_limit_MB": 64}
    assert server.asked("/run_code") == [request]
    assert server.last_headers["X-Key"] == "k"


@confined
def test_a_server_gives_what_this_machine_gives(server):
    local = patient()

    def serve(body):
        [call] = run(local, body["code"])
        if call.error:
            return fusion("Failed", code=1, stderr=call.error.removeprefix("CodeError: "))
        return fusion(**call.data)

    server.reply = serve
    here, there = (
        [call.result for call in run(sandbox, "print(sum(range(10)))", "1 / 0", "pass")]
        for sandbox in (local, RemotePython(f"{server.url}/run_code"))
    )
    assert here == there


def test_a_server_that_is_gone_is_an_error_for_the_model():
    [call] = run(RemotePython("http://127.0.0.1:1/run_code"), "print(1)")
    assert call.error.startswith("RuntimeError: The sandbox at http://127.0.0.1:1/run_code failed: ConnectError")
