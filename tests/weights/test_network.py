"""The transfer over the network: what the trainer offers, and how a server fetches it."""

import atexit
import contextlib
import copy
import os
import re
import shutil
import socket
import stat
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import pytest
import torch
from support.loopback import Loopback, Reply, free_port
from support.replicas import Remote, step_of
from support.waiting import until

from mt_grpo.errors import ConfigError, WeightSyncError
from mt_grpo.vllm_plugin import fetch
from mt_grpo.vllm_plugin.fetch import Fetcher, FetchError, apply, difference
from mt_grpo.vllm_plugin.guard import FETCH
from mt_grpo.weights import network
from mt_grpo.weights.files import SafetensorsTransport
from mt_grpo.weights.network import DeltaTransport, HttpTransport, _FileOffer, _own_address

UPDATE = ["/sleep", "/start_weight_update", "/update_weights", "/init_weight_transfer_engine"]
UPDATE += ["/finish_weight_update", "/reset_prefix_cache", "/wake_up"]


@pytest.fixture
def pair(tokenizer, tmp_path):
    """Two servers on one machine, whose files both see."""
    both = [Remote(tokenizer, tmp_path), Remote(tokenizer, tmp_path)]
    yield both
    for each in both:
        each.close()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def remote(pair):
    return pair[0]


@pytest.fixture
def sync(remote, sync_of):
    return sync_of(remote, kind=HttpTransport)


@pytest.fixture
def changes(remote, model, sync_of):
    """Sends what changes of a model in bfloat16."""
    model.bfloat16()
    remote.model.bfloat16()
    remote.dtype = "torch.bfloat16"
    return sync_of(remote, kind=DeltaTransport)


def learn(sync, model, *steps):
    for step in steps:
        model.model.embed_tokens.weight.data[step] *= 1.5
        sync.sync(step)


def test_weights_are_fetched_before_the_server_is_paused(remote, sync):
    for step in range(3):
        sync.sync(step)
    known = {FETCH, *UPDATE, "/v1/completions"}
    posts = [path for method, path, _ in remote.http.requests if method == "POST" and path in known]
    nonce, proof = [FETCH, *UPDATE[3:4] * 2], [FETCH, *UPDATE, "/v1/completions"]
    assert posts == nonce + proof * 2 + [FETCH, *UPDATE] * 2
    assert step_of(remote.version) == "2" and sync.fleet.payload.checksum == remote.loaded
    assert len(list(remote.folder.glob("*/*"))) == fetch.NUM_FILES


@pytest.mark.parametrize("elsewhere", [False, True], ids=["one host", "another host"])
@pytest.mark.parametrize("kind", ["sync", "changes"])
def test_a_server_that_comes_back_fetches_the_latest(remote, kind, model, request, tmp_path, elsewhere):
    """A process on another host has no file, and the process that has one may be waiting for it."""
    sync = other = request.getfixturevalue(kind)
    learn(sync, model, 0, 1)
    if elsewhere:
        other = copy.copy(sync)
        other.accelerator = SimpleNamespace(is_main_process=False, unwrap_model=lambda wrapped: wrapped)
        other.source, other.transport = copy.copy(sync.source), copy.copy(sync.transport)
        other.source.accelerator, other.transport._base = other.accelerator, ""
        other.fleet = copy.copy(sync.fleet)
        other.fleet.payload = replace(sync.fleet.payload, path=tmp_path / "elsewhere" / sync.fleet.payload.path.name)
    remote.fetcher.close()
    remote.fetcher = Fetcher(str(remote.folder))
    remote.version, remote.loaded = "default", "nothing"
    other.restore(remote.http.url)
    assert step_of(remote.version) == "1" and sync.fleet.payload.checksum == remote.loaded


def test_a_server_that_cannot_fetch_is_refused_at_the_start(remote, sync):
    remote.refused = FETCH
    with pytest.raises(WeightSyncError, match="cannot fetch the trainer's weights.*`mt-grpo serve`"):
        sync.begin()


# Changes


def fetched(remote) -> list[str]:
    """What was sent, since the nonce."""
    return [url.rsplit("/", 1)[1].split("-")[0] for url in remote.urls[1:]]


def test_a_proxys_bad_gateway_at_a_fetch_is_asked_again(remote, sync, model):
    refusals = [(502, "<html>bad gateway</html>")]

    def answer(method, path, body):
        return (
            refusals.pop()
            if path == FETCH and remote.version != "default" and refusals
            else remote.answer(method, path, body)
        )

    remote.http._script = answer
    sync.sync(0)
    learn(sync, model, 1)
    assert step_of(remote.version) == "1" and not refusals


def test_changes_are_sent_where_they_are_less(remote, changes, model, monkeypatch):
    learn(changes, model, 0, 1, 2, 3)
    assert fetched(remote) == ["weights"] * 2 + ["change"] * 3  # the proof and the first are whole
    sizes = [body["size"] for body in remote.http.asked(FETCH)]
    assert sizes[-1] < 0.1 * sizes[1] and changes.fleet.payload.checksum == remote.loaded
    for weight in model.parameters():
        weight.data += 1
    changes.sync(4)
    assert fetched(remote)[-1] == "weights" and changes.fleet.payload.checksum == remote.loaded
    monkeypatch.setattr(network, "WHOLE_EVERY", 2)  # all weights are sent now and then
    learn(changes, model, 5, 6, 7)
    assert fetched(remote)[-3:] == ["change", "weights", "change"] and step_of(remote.version) == "7"


@pytest.mark.parametrize("doubt", ["another file", "another checksum"])
def test_in_doubt_all_weights_are_sent_again(remote, changes, model, monkeypatch, caplog, doubt):
    learn(changes, model, 0)
    if doubt == "another file":
        remote.fetcher.close()
        remote.fetcher = Fetcher(str(remote.folder))
    else:
        monkeypatch.setattr(fetch, "apply", lambda change, file: file.view(-1)[-4:].zero_())
    learn(changes, model, 1)
    assert fetched(remote) == ["weights", "weights", "change", "weights"]
    assert changes.fleet.payload.checksum == remote.loaded
    assert "gets its weights in another way: " in caplog.text


@pytest.mark.parametrize(("name", "words"), [("change-", "All weights are sent"), (".nonce", "No space left on")])
def test_a_full_disk_is_told_of(remote, changes, model, monkeypatch, caplog, name, words):
    """There is room for two files of all weights, not for what changed beside them."""
    write = Path.write_bytes

    def full(path, content):
        if name in path.name:
            raise OSError(28, "No space left on device", str(path))
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    if name == ".nonce":
        with pytest.raises(WeightSyncError, match=words):
            changes.sync(0)
        return
    learn(changes, model, 0, 1)
    assert words in caplog.text and step_of(remote.version) == "1"
    assert fetched(remote) == ["weights"] * 3 and changes.fleet.payload.checksum == remote.loaded


@pytest.mark.parametrize("size", [2, 131_072, 262_150, 400_001])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("anywhere", [False, True])
def test_a_change_makes_the_new_file_of_the_old(size, share, anywhere, monkeypatch):
    """Words go up by a little, or to any other value, infinities among them."""
    monkeypatch.setattr(fetch, "STRETCH", 70_000)
    old = torch.randint(256, (size,), dtype=torch.uint8)
    new = old.clone()
    places = torch.randint(size // 2, (int(size // 2 * share),)) * 2
    new[places] += 1
    if anywhere:
        new[places + 1] += torch.randint(256, places.shape, dtype=torch.uint8)
    change = difference(old, new, most=10.0)
    made = old.clone()
    apply(change, made)
    assert torch.equal(made, new)
    for broken in (change[:-2], change[: len(change) // 2], torch.cat([change[:1] + 7, change[1:]])):
        with pytest.raises(ValueError, match="not one of this file"):
            apply(broken, old.clone())


def test_steps_of_a_trained_model_take_little():
    """Noise of the size of a step of a weight of 0.03, as an optimiser with a rate of 3e-4 makes it."""
    weights = torch.randn(500_000, generator=torch.Generator().manual_seed(0)) * 0.08
    after = weights + 2e-4 * torch.randn(500_000, generator=torch.Generator().manual_seed(1)).clamp(-1, 1)
    old, new = (one.to(torch.bfloat16).view(torch.uint8) for one in (weights, after))
    change = difference(old, new)
    assert (old.view(torch.int16) != new.view(torch.int16)).float().mean() > 0.25
    assert change.numel() <= 0.13 * new.numel()
    apply(change, old)
    assert torch.equal(old, new)
    assert difference(old, old + 1) is None  # where most words changed


# What is offered


@pytest.fixture
def offer(tmp_path):
    (tmp_path / "weights.safetensors").write_bytes(bytes(range(256)) * 100)
    offer = _FileOffer(tmp_path, "127.0.0.1")
    yield offer.url("127.0.0.1")
    offer.close()


@pytest.mark.parametrize(
    ("path", "begin", "status"),
    [
        *((f"/{name}", 0, 404) for name in ("other.safetensors", "../weights.safetensors", "%2e%2e/etc/passwd", "")),
        *((path, 0, 404) for path in ("/.hidden", "/../guessed/weights.safetensors")),
        *(("/weights.safetensors", begin, 400) for begin in ("9" * 5000, "-5", "x")),
        *(("/weights.safetensors", begin, 416) for begin in ("9" * 17, "25600")),
        ("/weights.safetensors", "25599", 206),
    ],
)
def test_an_offer_has_its_files_for_who_knows_its_secret(offer, tmp_path, path, begin, status):
    (tmp_path / ".hidden").touch()
    answer = httpx.get(f"{offer}{path}", headers={"Range": f"bytes={begin}-"})
    assert answer.status_code == status and len(answer.content) == (status == 206)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["[::1]", "127.0.0.1"])
def test_servers_of_either_protocol_fetch(tmp_path, monkeypatch, host):
    (tmp_path / "weights").write_bytes(b"content")
    monkeypatch.setattr(network, "is_local", lambda host: False)
    assert _own_address(f"http://{host}:8000") == host
    offer = _FileOffer(tmp_path, "")
    fetch._download(f"{offer.url(host)}/weights", tmp_path / "copy", 7)
    offer.close()
    assert (tmp_path / "copy").read_bytes() == b"content"


def test_a_long_way_is_told_of(offer, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(network, "NOTICE_EVERY", 0.0)
    fetch._download(f"{offer}/weights.safetensors", tmp_path / "copy", 25_600)
    assert (tmp_path / "copy").read_bytes() == bytes(range(256)) * 100
    until(lambda: "127.0.0.1 has fetched 0.0 of 0.0 GB of the weights" in caplog.text)


def raw(url, *sent):
    """A connection to an offer that has sent something."""
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=30)
    for each in sent:
        connection.sendall(each)
    return connection


def threads():
    return sum(one.name.startswith("mt-grpo-weights") for one in threading.enumerate())


def test_half_open_connections_hold_up_nobody(offer, tmp_path, monkeypatch):
    monkeypatch.setattr(network, "MAX_WAITING", 8)
    before = threads()
    held = [raw(offer, b"GET /") for _ in range(40)]
    fetch._download(f"{offer}/weights.safetensors", tmp_path / "copy", 25_600)
    assert threads() <= before + 1
    with contextlib.suppress(ConnectionResetError):  # which says the same
        assert not held[0].recv(1)  # the oldest was ended
    for connection in held:
        connection.close()


def test_connections_that_come_at_once_do_not_hold_up_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(network, "MAX_WAITING", 8)
    waiting = []

    class Watched(_FileOffer):
        async def _answer(self, *connection):
            waiting.append(len(self._waiting))
            await super()._answer(*connection)

    offer = Watched(tmp_path, "127.0.0.1")
    offer._thread.loop.call_soon_threadsafe(time.sleep, 0.3)  # meanwhile all of them come
    held = [raw(offer.url("127.0.0.1")) for _ in range(100)]
    until(lambda: len(waiting) > 80)
    assert max(waiting) <= 10
    offer.close()
    for connection in held:
        connection.close()


def test_a_request_that_does_not_arrive_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(network, "HEAD_TIMEOUT", 0.05)
    offer = _FileOffer(tmp_path, "127.0.0.1")
    with raw(offer.url("127.0.0.1"), b"GET /") as connection:
        assert not connection.recv(1)
    offer.close()


def test_connections_that_break_leave_no_traceback(offer, tmp_path, capfd, caplog):
    secret = urlsplit(offer).path
    (tmp_path / "large").write_bytes(bytes(2**24))
    for number in range(20):
        connection = raw(offer, f"GET {secret}/large HTTP/1.1\r\n{'Host: x' * (number % 2)}\r\n\r\n".encode())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    fetch._download(f"{offer}/weights.safetensors", tmp_path / "copy", 25_600)
    assert "Traceback" not in capfd.readouterr().err + caplog.text


@pytest.mark.parametrize("sent", [b"POST /x HTTP/1.1\r\n\r\n", b"\x16\x03\x01\r\n\r\n", b"x" * 10_000])
def test_what_is_no_request_is_refused(offer, sent):
    with raw(offer, sent) as connection, contextlib.suppress(ConnectionResetError):
        assert connection.recv(100).startswith(b"HTTP/1.1 404") or sent.startswith(b"xxx")


def test_a_port_that_is_taken_is_said_at_once(sync_of):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(WeightSyncError, match="cannot be offered at port.*`weight_sync_port`"):
            sync_of("http://127.0.0.1:9", kind=HttpTransport, port=taken.getsockname()[1])


@pytest.mark.parametrize("kind", [SafetensorsTransport, HttpTransport])
def test_without_a_folder_nothing_is_left_for_the_exit(sync_of, monkeypatch, kind):
    registered = []
    monkeypatch.setattr(atexit, "register", registered.append)
    with pytest.raises(ConfigError, match="No folder for weights can be made"):
        sync_of("http://127.0.0.1:9", kind=kind, folder="/proc/x")
    for close in registered:
        close()


def test_weights_are_offered_at_the_port_that_is_chosen(remote, sync_of):
    port = free_port()
    for _ in range(2):  # a run that is resumed has it again
        sync = sync_of(remote, kind=HttpTransport, port=port)
        sync.sync(0)
        sync.close()
    assert {urlsplit(url).port for url in remote.urls} == {port}


# Several servers


@pytest.mark.parametrize("kind", [HttpTransport, DeltaTransport])
def test_replicas_of_one_machine_fetch_once(pair, sync_of, model, kind):
    sync = sync_of(*pair, kind=kind)
    learn(sync, model, 0, 1, 2)
    assert [step_of(each.version) for each in pair] == ["2", "2"]
    assert pair[0].loaded == pair[1].loaded == sync.fleet.payload.checksum
    assert len(list(pair[0].folder.glob("*/*.safetensors"))) == fetch.NUM_FILES + 1  # and the nonce of the second
    assert len(pair[1].urls) == 1
    sync.client.servers[0].drop("gone")
    learn(sync, model, 5)
    assert step_of(pair[1].version) == "5" and pair[1].loaded == sync.fleet.payload.checksum
    sync.close()


def test_replicas_that_share_an_address_only_fetch_each(pair, sync_of):
    """As containers do whose ports are mapped."""
    seen = pair[1].confirmed
    pair[1].confirmed = lambda checksum, path=None: (
        (500, f"No such file or directory: {path}")
        if path is not None and str(Path(path).parent) == str(pair[0].fetcher._folder)
        else seen(checksum, path)
    )
    sync = sync_of(*pair, kind=HttpTransport)
    for step in range(2):
        sync.sync(step)
    assert [step_of(each.version) for each in pair] == ["1", "1"]
    assert len(pair[1].urls) == 4  # the nonce, the proof, and two steps
    sync.close()


# What is fetched


@pytest.fixture
def fetcher_in():
    """Makes fetchers, and closes them."""
    made = []

    def make(folder):
        folder.mkdir(exist_ok=True)
        made.append(Fetcher(str(folder)))
        return made[-1]

    yield make
    for fetcher in made:
        fetcher.close()


def weights_of(fetcher, offer):
    return Path(fetcher.fetch(f"{offer}/weights.safetensors", 25_600))


def test_a_broken_connection_is_gone_on_from_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
    content, begun = bytes(range(256)) * 10, []

    def answer(request):
        begun.append(int(re.fullmatch(r"bytes=(\d+)-", request.headers["Range"])[1]))
        return Reply(206, content[begun[-1] : begun[-1] + 700], len(content) - begun[-1])

    server = Loopback(answer)
    fetch._download(f"{server.url}/weights", tmp_path / "copy", len(content))
    server.stop()
    assert (tmp_path / "copy").read_bytes() == content and begun == [0, 700, 1400, 2100]


@pytest.mark.parametrize(
    ("url", "asked", "problem"),
    [
        ("gone", {}, "HTTP 404"),
        ("http://127.0.0.1:9/weights", {}, "could not be read from byte 0 of 10"),
        ("file:///etc/passwd", {}, "is no address of a file"),
        ("nothing", {}, "is no address of a file"),
        *((None, {"size": size}, "A file has 1 to") for size in (0, -1, 10**30, True, 25.6, "25600")),
        *((None, asked, "are texts") for asked in ({"url": 7}, {"label": ["a"]}, {"base": {}})),
    ],
)
def test_what_cannot_be_fetched_is_one_sentence(offer, tmp_path, monkeypatch, fetcher_in, url, asked, problem):
    monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
    fetcher = fetcher_in(tmp_path / "shm")
    with pytest.raises(FetchError, match=problem):
        fetcher.fetch(**{"url": f"{offer}/gone" if url == "gone" else url or "x", "size": 10, **asked})
    assert not (asked and list((tmp_path / "shm").iterdir()))


def attack(root, kind):
    """What another user may make before the server fetches anything, under names that can be known."""
    victim, trap = root / "victim", root / "trap"
    victim.write_bytes(b"precious")
    trap.mkdir(mode=0o777)
    for name in ("0.safetensors", "1.safetensors", "change"):
        (trap / name).hardlink_to(victim) if kind == "hard link" else (trap / name).symlink_to(victim)
    for name in (f"{fetch._machine()}-{os.getpid()}", f"{fetch._machine()}-{os.getpid()}-"):
        (root / name).symlink_to(trap) if kind == "folder's link" else (root / name).mkdir(mode=0o777)
    return victim


@pytest.mark.parametrize("kind", ["link", "hard link", "folder's link", "open folder"])
def test_nobody_else_reads_or_writes_what_is_fetched(offer, tmp_path, fetcher_in, kind):
    root = tmp_path / "shm"
    root.mkdir(mode=0o777)
    victim = attack(root, kind)
    path = weights_of(fetcher_in(root), offer)
    folder, file = path.parent.lstat(), path.lstat()
    assert victim.read_bytes() == b"precious" and not path.parent.is_symlink()
    assert (stat.S_IMODE(folder.st_mode), stat.S_IMODE(file.st_mode), file.st_nlink) == (0o700, 0o600, 1)
    assert folder.st_uid == file.st_uid == os.geteuid()
    assert weights_of(fetcher_in(root), offer).parent.name != path.parent.name


def test_what_stands_for_a_folder_that_is_gone_is_not_used(offer, tmp_path, fetcher_in):
    """Its name is known by then."""
    (trap := tmp_path / "trap").mkdir(mode=0o777)
    fetcher = fetcher_in(tmp_path)
    gone = weights_of(fetcher, offer).parent
    shutil.rmtree(gone)
    gone.symlink_to(trap)
    assert weights_of(fetcher, offer).parent != gone
    assert not list(trap.iterdir())


@pytest.mark.parametrize("foreign", [False, True])
def test_folders_of_killed_servers_of_this_user_are_removed(offer, tmp_path, monkeypatch, fetcher_in, foreign):
    (old := tmp_path / f"{fetch._machine()}-999999999-x").mkdir()
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + foreign)
    weights_of(fetcher_in(tmp_path), offer)
    assert old.exists() == foreign


def test_no_link_is_followed_to_another_file(offer, tmp_path):
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "copy").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        fetch._download(f"{offer}/weights.safetensors", tmp_path / "copy", 25_600)
    assert (tmp_path / "victim").read_bytes() == b"precious"


@contextlib.contextmanager
def trickling(head, byte=b"x", then=lambda: None):
    """The address of a server that sends a head, calls something, and sends one byte again and again, or nothing."""
    over = threading.Event()

    def trickle(server):
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 206 OK\r\nContent-Length: 10000\r\n" + head)
            then()
            while not over.wait(0.01):
                connection.sendall(byte)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=trickle, args=(server,))
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/weights"
        over.set()
        thread.join()


@pytest.mark.parametrize("head", [b"", b"\r\n"], ids=["the head", "the file"])
def test_a_trickle_is_given_up_though_it_never_ends(tmp_path, monkeypatch, head):
    assert fetch.time_limit(140 * 10**9) > 20 * fetch.time_limit(10**6)  # larger files may take longer
    monkeypatch.setattr(fetch, "BASE_TIMEOUT", 0.3)
    with trickling(head) as url, pytest.raises(FetchError, match="in 0 s, and is given up"):
        fetch._download(url, tmp_path / "copy", 10_000)


def test_a_server_that_ends_waits_for_no_trainer(tmp_path, fetcher_in):
    """Its process ends when its threads have. A request may still have waited for the one before it."""
    fetcher, begun = fetcher_in(tmp_path), time.monotonic()
    with trickling(b"\r\nx", b"", fetcher.close) as url:
        for _ in range(2):
            with pytest.raises(FetchError, match=r"^This server is shutting down\.$"):
                fetcher.fetch(url, 10_000)
    assert time.monotonic() - begun < fetch.READ_TIMEOUT / 2 and not list(tmp_path.iterdir())
