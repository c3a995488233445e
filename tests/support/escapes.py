"""Ways out of a sandbox, as Python code that tries each of them and says which led out."""

import json
from typing import Any

HARMLESS = {
    "reads a file": "open(victim).read()",
    "reads a system file": "open('/etc/passwd').read()",
    "reads through a link": "(os.symlink(victim, 'link'), open('link').read())",
    "lists a folder": "os.listdir(folder)",
    "lists the root": "os.listdir('/')",
    "reads the environment of the process that started it": "open(f'/proc/{os.getppid()}/environ').read()",
    "sees a variable of the trainer": "os.environ['MT_GRPO_SECRET']",
    "writes a file": "open(folder + '/written', 'w').write('x')",
    "truncates a file": "os.truncate(spare, 0)",
    "renames a file": "(os.rename(spare, spare + '2'), os.rename(spare + '2', spare))",
    "makes a folder": "os.mkdir(folder + '/made')",
    "changes a mode": "os.chmod(spare, 0o600)",
    "changes an owner": "os.chown(spare, os.getuid(), os.getgid())",
    "changes a time": "os.utime(spare, (1, 1))",
    "watches a folder": "called('inotify_add_watch', libc.inotify_init(), folder.encode(), 0xFFF)",
    "runs a program": "subprocess.run(['/bin/sh', '-c', 'true'], check=True)",
    "connects by TCP": "socket.create_connection(('127.0.0.1', port), 2)",
    "connects by the first send": "first_send()",
    "connects to a Unix socket": "socket.socket(socket.AF_UNIX).connect(folder + '/socket')",
    "connects to an abstract socket": "socket.socket(socket.AF_UNIX).connect(chr(0) + abstract)",
    "sends by UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
    "listens": "listen()",
    "talks to the kernel's network": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "signals the process that started it": "os.kill(os.getppid(), 0)",
    "signals the trainer": "os.kill(trainer, 0)",
    "reads a limit of the trainer": "resource.prlimit(trainer, resource.RLIMIT_CORE)",
    "changes a priority of the trainer": "os.setpriority(0, trainer, os.getpriority(0, trainer))",
    "moves the trainer to other cores": "os.sched_setaffinity(trainer, os.sched_getaffinity(trainer))",
    "takes hold of the trainer": "os.pidfd_open(trainer)",
    "keeps memory that no limit counts": "os.memfd_create('x')",
}  # fmt: skip
"""What an unconfined process may do, and does no harm by."""

HARMFUL = {
    "connects by Multipath TCP": "socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262).connect(('127.0.0.1', port))",
    "opens a raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "opens a connection by number": "called(41, 2, 1, 0)",
    "traces the trainer": "called('ptrace', 16, trainer, 0, 0)",
    "reads the trainer's memory": "called('process_vm_readv', trainer, 0, 0, 0, 0, 0)",
    "makes a device": "os.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(8, 0))",
    "mounts": "called('mount', b'none', b'.', b'tmpfs', 0, 0)",
    "makes a user namespace": "called('unshare', 0x10000000)",
    "makes a network namespace": "called('unshare', 0x40000000)",
    "enters a namespace": "called('setns', 0, 0)",
    "changes its root": "os.chroot('.')",
    "raises its limits": "resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))",
    "raises its priority": "os.nice(-5)",
    "becomes another user": "(os.getuid() == 0 or fail(), os.setuid(65534))",
    "sets the clock": "called('clock_settime', 0, 0)",
    "sets the host's name": "called('sethostname', 0, -1)",
    "loads code into the kernel": "called('bpf', 0, 0, 0)",
    "loads a module": "called('init_module', 0, 0, b'')",
    "watches the kernel": "called('perf_event_open', 0, 0, -1, -1, 0)",
    "uses io_uring": "called('io_uring_setup', 1, ctypes.create_string_buffer(200))",
    "handles page faults": "called('userfaultfd', 0)",
    "adds a key": "called('add_key', b'user', b'x', b'x', 1, -2)",
    "shares memory with others": "called('shmget', 1234, 4096, 0o1600)",
    "opens a message queue": "called('mq_open', b'x', 0o102, 0o600, 0)",
    "reads the kernel's log": "called('syslog', 10, 0, 0)",
}
"""
What is tried in the sandbox alone, since most of it needs privileges. Where it would do harm its arguments are wrong:
then the kernel says so to those who may, and denies it to the others.
"""

NUMBERS = {
    "inotify_add_watch": 254, "ptrace": 101, "process_vm_readv": 310, "mount": 165, "unshare": 272, "setns": 308,
    "clock_settime": 227, "sethostname": 170, "bpf": 321, "init_module": 175, "perf_event_open": 298,
    "io_uring_setup": 425, "userfaultfd": 323, "add_key": 248, "shmget": 29, "mq_open": 240, "syslog": 103,
}  # fmt: skip
"""Of system calls, on x86-64."""

ATTEMPT = """
import ctypes, json, os, resource, socket, stat, subprocess

libc = ctypes.CDLL(None, use_errno=True)


def called(name, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(numbers.get(name, name), *arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def fail():
    raise PermissionError


def first_send():
    try:
        socket.socket().sendto(b"x", socket.MSG_FASTOPEN, ("127.0.0.1", port))
    except BlockingIOError:  # the connection is on its way
        pass


def listen():
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()


outcomes = {}
for name, act in acts.items():
    try:
        eval(act)
        outcomes[name] = "done"
    except BaseException as error:
        outcomes[name] = f"{type(error).__name__}: {error}"
print(json.dumps(outcomes))
"""


def attempt(acts: dict[str, str], **known: Any) -> str:
    """Code that does all of `acts` and prints what came of each; `known` are the names they use."""
    known |= {"acts": acts, "numbers": NUMBERS}
    return "".join(f"{name} = {json.loads(json.dumps(value))!r}\n" for name, value in known.items()) + ATTEMPT
