"""The transfer over the network: what the trainer offers, and how a server fetches it."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
import torch
from accelerate import Accelerator
from support.loopback import Loopback, Reply
from support.replicas import Replica, step_of

from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.vllm_plugin import delta as module
from mt_grpo.vllm_plugin import fetch
from mt_grpo.vllm_plugin.delta import apply, difference
from mt_grpo.vllm_plugin.fetch import Fetcher, FetchError
from mt_grpo.vllm_plugin.guard import FETCH
from mt_grpo.weights.transports import delta
from mt_grpo.weights.transports.delta import DeltaTransport
from mt_grpo.weights.transports.http import FileOffer, HttpTransport
from mt_grpo.weights.updates import WeightSyncError

UPDATE = ["/sleep", "/start_weight_update", "/update_weights", "/init_weight_transfer_engine"]
UPDATE += ["/finish_weight_update", "/reset_prefix_cache", "/wake_up"]


class Remote(Replica):
    """A server on another machine: it sees only what it has fetched."""

    def __init__(self, tokenizer, folder: Path) -> None:
        super().__init__(tokenizer)
        self.folder, self.fetcher, self.urls = folder, Fetcher(str(folder)), []

    def answer(self, method, path, body):
        if path == FETCH and path != self.refused:
            self.urls.append(body["url"])
            try:
                return 200, {"path": self.fetcher.fetch(**body)}
            except FetchError as error:
                return 502, {"error": str(error)}
        if path == "/update_weights":
            assert Path(body["update_info"]["path"]).is_relative_to(self.folder)
        return super().answer(method, path, body)


@pytest.fixture
def remote(tokenizer, tmp_path):
    server = Remote(tokenizer, tmp_path)
    yield server
    server.http.stop()
    server.fetcher.close()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def sync(remote, model):
    client = VLLMServerClient(remote.http.url, remote.tokenizer, server_timeout=5.0)
    sync = HttpTransport(client, lambda: model, Accelerator(cpu=True))
    yield sync
    sync.close()


def test_weights_are_fetched_before_the_server_is_paused(remote, sync):
    for step in range(3):
        sync.sync(step)
    known = {FETCH, *UPDATE, "/v1/completions"}
    posts = [path for method, path, _ in remote.http.requests if method == "POST" and path in known]
    nonce, proof = [FETCH, *UPDATE[3:4] * 2], [FETCH, *UPDATE, "/v1/completions"]
    assert posts == nonce + proof * 2 + [FETCH, *UPDATE] * 2
    assert step_of(remote.version) == "2" and sync.checksum == remote.loaded
    assert len(list(remote.folder.glob("*/*"))) == fetch.FILES


def test_a_server_that_comes_back_fetches_the_latest(remote, sync, model):
    sync.sync(0)
    model.model.embed_tokens.weight.data *= 1.5
    sync.sync(1)
    remote.version, remote.loaded = "default", "nothing"
    sync.restore(remote.http.url)
    assert step_of(remote.version) == "1" and sync.checksum == remote.loaded


def test_a_server_that_cannot_fetch_is_refused_at_the_start(remote, sync):
    remote.refused = FETCH
    with pytest.raises(WeightSyncError, match="cannot fetch the trainer's weights.*`mt-grpo serve`"):
        sync.begin()


@pytest.fixture
def changes(remote, model):
    """Sends what changes of a model in bfloat16."""
    model.bfloat16()
    remote.model.bfloat16()
    remote.dtype = "torch.bfloat16"
    client = VLLMServerClient(remote.http.url, remote.tokenizer, server_timeout=5.0)
    sync = DeltaTransport(client, lambda: model, Accelerator(cpu=True))
    yield sync
    sync.close()


def fetched(remote) -> list[str]:
    """What was sent, since the nonce."""
    return [url.rsplit("/", 1)[1].split("-")[0] for url in remote.urls[1:]]


def test_of_most_weights_only_changes_are_sent(remote, changes, model):
    for step in range(4):
        model.model.embed_tokens.weight.data[step] *= 1.5
        changes.sync(step)
        assert changes.checksum == remote.loaded
    assert fetched(remote) == ["weights"] * 2 + ["change"] * 3  # the proof and the first are whole
    sent, whole = remote.http.asked(FETCH)[-1]["size"], remote.http.asked(FETCH)[1]["size"]
    assert sent < 0.1 * whole and step_of(remote.version) == "3"


def test_where_all_weights_changed_all_are_sent(remote, changes, model):
    changes.sync(0)
    for weight in model.parameters():
        weight.data += 1
    changes.sync(1)
    assert fetched(remote) == ["weights"] * 3 and changes.checksum == remote.loaded


def test_a_server_with_another_file_gets_all_weights(remote, changes, model):
    changes.sync(0)
    remote.fetcher.close()
    remote.fetcher = Fetcher(str(remote.folder))
    changes.sync(1)
    assert fetched(remote) == ["weights", "weights", "change", "weights"] and changes.checksum == remote.loaded


def test_in_doubt_all_weights_are_sent_again(remote, changes, monkeypatch):
    changes.sync(0)
    monkeypatch.setattr(fetch, "apply", lambda change, file: file.view(-1)[-4:].zero_())
    changes.sync(1)
    assert fetched(remote) == ["weights", "weights", "change", "weights"] and changes.checksum == remote.loaded


def test_all_weights_are_sent_now_and_then(remote, changes, monkeypatch):
    monkeypatch.setattr(delta, "WHOLE_EVERY", 2)
    for step in range(4):
        changes.sync(step)
    assert fetched(remote) == ["weights", "weights", "change", "weights", "change"]


@pytest.mark.parametrize("size", [2, 131_072, 262_150, 400_001])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("anywhere", [False, True])
def test_a_change_makes_the_new_file_of_the_old(size, share, anywhere, monkeypatch):
    """Words go up by a little, or to any other value, infinities among them."""
    monkeypatch.setattr(module, "STRETCH", 70_000)
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


def test_where_most_words_changed_there_is_no_change():
    old = torch.randint(256, (100_000,), dtype=torch.uint8)
    assert difference(old, old + 1) is None


@pytest.fixture
def offer(tmp_path):
    (tmp_path / "weights.safetensors").write_bytes(bytes(range(256)) * 100)
    offer = FileOffer(tmp_path, "127.0.0.1")
    yield offer.url("127.0.0.1")
    offer.close()


@pytest.mark.parametrize("name", ["other.safetensors", "../weights.safetensors", "%2e%2e/etc/passwd", ".hidden", ""])
def test_an_offer_has_only_the_files_of_its_folder(offer, tmp_path, name):
    (tmp_path / ".hidden").touch()
    assert httpx.get(f"{offer}/{name}").status_code == 404


def test_an_offer_is_for_those_who_know_its_secret(offer):
    assert httpx.get(f"{offer}/weights.safetensors").status_code == 206
    assert httpx.get(f"{offer.rsplit('/', 1)[0]}/guessed/weights.safetensors").status_code == 404


def test_what_is_fetched_is_what_was_offered(offer, tmp_path):
    fetch.download(f"{offer}/weights.safetensors", tmp_path / "copy", 25_600)
    assert (tmp_path / "copy").read_bytes() == bytes(range(256)) * 100


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)


@pytest.fixture
def broken():
    """Closes each connection after 700 bytes, and notes where each began."""
    content, begun = bytes(range(256)) * 10, []

    def answer(request):
        begin = int(re.fullmatch(r"bytes=(\d+)-", request.headers["Range"])[1])
        begun.append(begin)
        return Reply(206, content[begin : begin + 700], len(content) - begin)

    server = Loopback(answer)
    yield server.url, begun, content
    server.stop()


def test_a_broken_connection_is_gone_on_from_its_end(broken, tmp_path, quick):
    url, begun, content = broken
    fetch.download(f"{url}/weights", tmp_path / "copy", len(content))
    assert (tmp_path / "copy").read_bytes() == content
    assert begun == [0, 700, 1400, 2100]


def test_a_file_that_is_not_there_is_said_at_once(offer, tmp_path):
    with pytest.raises(FetchError, match="HTTP 404"):
        fetch.download(f"{offer}/gone", tmp_path / "copy", 10)


def test_a_trainer_that_is_gone_is_given_up(tmp_path, quick):
    with pytest.raises(FetchError, match="could not be read from byte 0 of 10"):
        fetch.download("http://127.0.0.1:9/weights", tmp_path / "copy", 10)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "nothing"])
def test_only_http_is_fetched(tmp_path, url):
    with pytest.raises(FetchError, match="is no address of a file"):
        Fetcher(str(tmp_path)).fetch(url, 10)


def test_files_of_a_killed_server_are_removed(offer, tmp_path):
    (old := tmp_path / f"{fetch.machine()}-999999999").mkdir()
    fetcher = Fetcher(str(tmp_path))
    fetcher.fetch(f"{offer}/weights.safetensors", 25_600)
    assert not old.exists()
    fetcher.close()
