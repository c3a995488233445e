"""
Runs Python code of a model in a confined process. It is started as a script, in a process of its own for every call:
the trainer forks nothing, hands on no open file, and loses nothing where this process dies.

It reads one line of JSON from standard input and writes one to standard output. The end of standard input means that
nobody waits: whatever runs is killed. `python_sandbox.py` is the other end.

The folder that the code writes to is a file system in memory, of a fixed size, in a mount namespace of this process:
the kernel counts what is in it, however it is hidden, and frees it with the last process that sees it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import shutil
import signal
import struct
import sys
import sysconfig
import tempfile
import threading
import time
from typing import IO, Any

_MAX_PROCESSES = 8
_MAX_OPEN_FILES = 64
"""Also of sockets in a pair, each of which holds up to 0.2 MiB of the kernel's memory that no limit counts."""
_MAX_FILES = 2_000
_GRACE_SECONDS = 1.0  # for what is left in the pipes once the code has ended

_DENIED = """
chmod fchmod fchmodat fchmodat2 chown lchown fchown fchownat utime utimes utimensat futimesat
setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat file_setattr
prlimit64 setpriority sched_setaffinity sched_setscheduler sched_setparam sched_setattr ioprio_set
clock_settime settimeofday adjtimex clock_adjtime
mknod mknodat chroot mount_setattr open_tree_attr
inotify_init inotify_init1 inotify_add_watch fanotify_init
pidfd_open pidfd_getfd process_madvise syslog mq_open memfd_create memfd_secret setsockopt
""".split()
"""
System calls that Landlock allows, with which a process could harm others of its user: they change modes, owners and
times of any file, limits and priorities of any process, the clock and devices, or take memory that no limit counts
(`setsockopt` makes the buffers of a pair of sockets large).
"""

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 0x4000, 0x40000
_MNT_DETACH = 2
_PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 22, 24, 36, 38
_SECCOMP_MODE_FILTER, _SECCOMP_RET_ALLOW, _SECCOMP_RET_ERRNO, _EPERM = 2, 0x7FFF0000, 0x00050000, 1
_BPF_LOAD_WORD, _BPF_JUMP_IF_EQUAL, _BPF_JUMP_IF_NOT_BELOW, _BPF_RETURN = 0x20, 0x15, 0x35, 0x06
_X32_SYSCALLS = 0x40000000
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The name Linux gives to a machine's own system calls; those of a 32-bit program have other numbers."""


class _Program(ctypes.Structure):
    """`struct sock_fprog` of Linux."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def _main() -> None:
    request = json.loads(sys.stdin.buffer.readline())
    scratch = tempfile.mkdtemp(prefix="mt-grpo-python-")
    code = request["code"].encode("utf-8", "replace")
    # Before there are threads: a process that has some enters no user namespace.
    writes = _mount(scratch, request["disk_limit"] + len(code))
    threading.Thread(target=_end_with_caller, args=(scratch,), daemon=True).start()
    what = "refused"  # the caller tells it; nothing ran unconfined
    try:
        with open(os.path.join(scratch, "main.py"), "wb") as file:
            file.write(code)
        process = _start(request, scratch, writes)
        what = "lost"
        answer = {**_finish(process, request, scratch, writes), "writes": writes}
    except Exception as error:
        answer = {what: f"{type(error).__name__}: {error}"}
    _clean_up(scratch)
    sys.stdout.buffer.write(json.dumps(answer).encode())
    sys.stdout.buffer.flush()
    os._exit(0)  # a thread may still wait for a pipe


def _start(request: dict[str, Any], scratch: str, writes: bool) -> Any:
    """Starts the code, confined. Returns sandlock's process."""
    import sandlock
    from sandlock._sdk import _lib

    _limit(request)
    _deny(_lib.sandlock_syscall_nr(b"socket"))
    python = os.path.realpath(sys.executable)
    packages = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    libraries = [os.path.join(sys.base_prefix, "lib"), "/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    readable = [python, *packages, *libraries, "/dev/null", "/dev/urandom", *request["readable"]]
    sandbox = sandlock.Sandbox(
        fs_readable=[path for path in dict.fromkeys([*readable, scratch]) if os.path.exists(path)],
        fs_writable=[scratch, "/dev/null"] if writes else ["/dev/null"],
        cwd=scratch,
        max_memory=request["memory_limit"],
        max_processes=_MAX_PROCESSES,
        no_coredump=True,
        extra_deny_syscalls=_DENIED,
        clean_env=True,
        env={
            "HOME": scratch,
            "TMPDIR": scratch,
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(packages)),
            "PYTHONHASHSEED": "0",
            "PYTHONIOENCODING": "utf-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
    )
    pipe = sandlock.StdioMode.PIPED
    return sandbox.popen([python, "-s", "main.py"], stdin=sandlock.StdioMode.NULL, stdout=pipe, stderr=pipe)


def _finish(process: Any, request: dict[str, Any], scratch: str, writes: bool) -> dict[str, Any]:
    """Waits for the end of the code and of all that it left behind."""
    late = threading.Event()

    def end() -> None:
        late.set()
        _kill_descendants()

    clock = threading.Timer(request["time_limit"], end)
    clock.daemon = True
    clock.start()
    readers = [_Reader(stream, request["output_limit"]) for stream in (process.stdout, process.stderr)]
    result = process.wait()
    clock.cancel()
    clock.join()
    _kill_descendants()  # what the code left in the background holds the pipes open
    deadline = time.monotonic() + _GRACE_SECONDS
    for reader in readers:
        reader.thread.join(max(0.0, deadline - time.monotonic()))
    killed = ("time" if late.is_set() else "killed") if result.exit_code < 0 else None
    left = os.statvfs(scratch)
    if writes and result.exit_code > 0 and not (left.f_bavail and left.f_favail):
        killed = "disk"
    answer: dict[str, Any] = {"killed": killed, "exit_code": result.exit_code}
    for name, reader in zip(("stdout", "stderr"), readers, strict=True):
        text = bytes(reader.kept).decode("utf-8", "replace").replace(f"{scratch}/", "")
        answer[name], answer[f"{name}_bytes"] = text, reader.size
    return answer


class _Reader:
    """Reads a stream to its end and keeps its beginning."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self.kept, self.size = bytearray(), 0
        self._stream, self._limit = stream, limit
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        while chunk := self._stream.read(1 << 16):
            self.kept += chunk[: self._limit - len(self.kept)]
            self.size += len(chunk)


def _mount(folder: str, size: int) -> bool:
    """Mounts an empty file system over a folder, for this process and its descendants alone."""
    libc = ctypes.CDLL(None)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWNS):
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
            return False
        maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
        try:
            for name, text in maps.items():
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        except OSError:  # the machine gives such a namespace no rights
            return False
    options = f"size={size},nr_inodes={_MAX_FILES},mode=700,uid={user},gid={group}".encode()
    return not (
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        or libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", _MS_NOSUID | _MS_NODEV, options)
    )


def _limit(request: dict[str, Any]) -> None:
    """Limits this process and all its descendants, for good."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # background processes become children of this one
    for capability in range(64):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # takes them from what root executes; others have none
    seconds = int(request["time_limit"]) + 2
    limits = {
        resource.RLIMIT_FSIZE: request["disk_limit"],
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
        resource.RLIMIT_CPU: seconds,  # for what would outlive this process
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def _deny(number: int) -> None:
    """Denies a system call for good: Sandlock and Landlock do not know all ways to a connection."""
    instructions = [  # operation, instructions to skip where it holds, where it does not, operand
        (_BPF_LOAD_WORD, 0, 0, 4),
        (_BPF_JUMP_IF_EQUAL, 0, 4, _ARCHITECTURES[platform.machine()]),
        (_BPF_LOAD_WORD, 0, 0, 0),
        (_BPF_JUMP_IF_EQUAL, 2, 0, number),
        (_BPF_JUMP_IF_NOT_BELOW, 1, 0, _X32_SYSCALLS),
        (_BPF_RETURN, 0, 0, _SECCOMP_RET_ALLOW),
        (_BPF_RETURN, 0, 0, _SECCOMP_RET_ERRNO | _EPERM),
    ]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
    program = _Program(len(instructions), ctypes.addressof(packed))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program)
    ):
        raise OSError(ctypes.get_errno(), "seccomp is not available")


def _end_with_caller(scratch: str) -> None:
    sys.stdin.buffer.read()
    _clean_up(scratch)
    os._exit(1)


def _clean_up(scratch: str) -> None:
    _kill_descendants()
    ctypes.CDLL(None).umount2(os.fsencode(scratch), _MNT_DETACH)  # its files go with it, however deep they lie
    shutil.rmtree(scratch, ignore_errors=True)  # empty, or with the code alone


def _kill_descendants() -> None:
    """Kills children until there are none: those of a killed one become children of this process."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while (children := _children()) and time.monotonic() < deadline:
        for child in children:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


def _children() -> list[int]:
    """Processes that live and are children of this one."""
    me, found = str(os.getpid()), []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat") as file:
                    state, parent, *_ = file.read().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                continue
            if parent == me and state != "Z":
                found.append(int(name))
    return found


if __name__ == "__main__":
    _main()
