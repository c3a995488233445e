"""Images in requests to a vLLM server that is scripted."""

import asyncio
import base64
import itertools

import msgspec
import pytest
import torch
from support.upstreams import SAMPLING, client_of, completion

from mt_grpo.concurrency import run
from mt_grpo.forward.media import MediumInputs
from mt_grpo.media import IMAGE
from mt_grpo.servers.http import ServerSetupError
from mt_grpo.vllm_plugin import IDENTITY

TOKEN = 7
PIXELS, GRID = torch.arange(24.0).reshape(12, 2), torch.tensor([[1, 3, 4]])
FIELDS = {
    "pixel_values": ["bfloat16", "flat", {"slices": [[[0, 4, None]]], "dim": 0, "keep_on_cpu": False}],
    "image_grid_thw": ["int64", "batched", {"keep_on_cpu": True}],
}
RENDER = "/v1/chat/completions/render"


def image(pixels=PIXELS):
    return MediumInputs(3, {"pixel_values": pixels, "image_grid_thw": GRID})


def rendering(fields):
    raw = msgspec.msgpack.Ext(3, b"")
    item = {name: {"data": [dtype, [0], raw], "field": field} for name, (dtype, *field) in fields.items()}
    content = base64.b64encode(msgspec.msgpack.encode(item)).decode()
    return 200, {"features": {"kwargs_data": {"image": [content]}}}


class Looker:
    """Scripts the endpoint that takes images: one token a time, and it fails where it does not know an image."""

    def __init__(self, forgets=None):
        self.requests, self.known, self.forgets = [], {}, forgets

    def __call__(self, body):
        self.requests.append(body)
        features = body["features"]
        for name, content in zip(features["mm_hashes"]["image"], features["kwargs_data"]["image"], strict=True):
            if content is not None:
                self.known[name] = content
        if len(self.requests) == self.forgets:
            self.known.clear()
        if features["mm_hashes"]["image"][0] not in self.known:
            return 500, {"error": {"message": "Internal server error"}}
        choice = {"token_ids": [5], "logprobs": {"content": [{"logprob": -0.25}]}, "finish_reason": "stop"}
        return 200, {"choices": [choice]}

    def sent(self):
        """How often images came with their content."""
        return sum(part is not None for body in self.requests for part in body["features"]["kwargs_data"]["image"])


@pytest.fixture
def ask(tokenizer, start):
    """Asks a server with a looker for contexts that show images, all at once or one after another."""

    def asked(looker, images, *contexts, at_once=True, version=None, **endpoints):
        server = start(**{RENDER: rendering(FIELDS), "/inference/v1/generate": looker, **endpoints})
        client = client_of(tokenizer, server, media_tokens={IMAGE: TOKEN}, server_timeout=20)
        client.weight_version = version

        def one(number, context):
            return client.generate_with_media(context, images, SAMPLING, str(number))

        async def go():
            try:
                if at_once:
                    return await asyncio.gather(*itertools.starmap(one, enumerate(contexts)))
                return [await one(number, context) for number, context in enumerate(contexts)]
            finally:
                await client.close()

        return run(go()), server

    return asked


@pytest.mark.parametrize("names", ["a", "ab"])
def test_answers_with_images_name_their_server(ask, names):
    """In a header: a server is not asked for its weights, and a router is noticed."""
    looker, left = Looker(), itertools.cycle(names)

    def named(body):
        return (*looker(body), {IDENTITY: next(left)})

    contexts = [[1, -4, -4, -4, 2]] * 5
    if len(names) > 1:
        with pytest.raises(ServerSetupError, match="is several servers in turn, as behind a router"):
            ask(named, {-4: image()}, *contexts, at_once=False, version=7)
    else:
        _, server = ask(named, {-4: image()}, *contexts, at_once=False, version=7)
        assert not server.asked("/weight_info")


def test_an_answer_with_images_that_names_no_server_ends_a_run(ask):
    with pytest.raises(ServerSetupError, match="nobody can tell which server gave them, and with which weights"):
        ask(Looker(), {-4: image()}, [1, -4, -4, -4, 2], version=7)


def test_images_are_sent_as_the_model_takes_them(ask):
    looker = Looker()
    [sample], _ = ask(looker, {-4: image()}, [1, -4, -4, -4, 2])
    assert (sample.ids, sample.logprobs, sample.finish_reason) == ([5], [-0.25], "stop")
    request = looker.requests[-1]
    assert request["token_ids"] == [1, TOKEN, TOKEN, TOKEN, 2]
    assert request["features"]["mm_placeholders"] == {"image": [{"offset": 1, "length": 3}]}
    assert request["sampling_params"]["seed"] == SAMPLING.seed
    (content,) = looker.known.values()
    item = msgspec.msgpack.decode(base64.b64decode(content), ext_hook=lambda code, data: bytes(data))
    dtype, shape, data = item["pixel_values"]["data"]
    assert (dtype, shape) == ("bfloat16", [12, 2])
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(12, 2), PIXELS.bfloat16())
    assert item["image_grid_thw"]["data"][1] == [3]  # of the one image, without a batch
    assert [item[name]["field"] for name in FIELDS] == [field[1:] for field in FIELDS.values()]


def test_conversations_that_show_one_image_send_it_once(ask):
    looker = Looker()
    ask(looker, {-4: image(), -8: image(PIXELS + 1)}, *[[1, -4, -4, -4], [-8] * 3 + [-4] * 3] * 4)
    assert looker.sent() == len(looker.known) == 2


def test_an_image_that_the_server_forgot_is_sent_again(ask):
    looker = Looker(forgets=2)  # the first one brought the image
    [sample], _ = ask(looker, {-4: image()}, [1, -4, -4, -4])
    assert sample.ids == [5] and looker.sent() == 2


def test_a_rendering_without_an_image_is_asked_for_again(ask):
    answers = iter([(200, {"features": None}), rendering(FIELDS)])
    [sample], _ = ask(Looker(), {-4: image()}, [1, -4, -4, -4], **{RENDER: lambda body: next(answers)})
    assert sample.ids == [5]


@pytest.mark.parametrize(
    ("context", "render", "sentence"),
    [
        ([-4, -4, -4], (404, {"detail": "Not Found"}), "is given tokens of text only"),
        (
            [-4, -4, -4],
            rendering(FIELDS | {"num_patches": ["int64", "batched", {}]}),
            "takes image_grid_thw, num_patches, pixel_values of an image",
        ),
        (
            [-4, -4, -4],
            rendering(FIELDS | {"pixel_values": ["uint8", "flat", {}]}),
            "as uint8, before they are normalized: .* `--no-mm-device-do-normalize`",
        ),
        ([-4, 3, -4, -4], rendering(FIELDS), "whose tokens stand together"),
        ([-3, -3, -3], rendering(FIELDS), "Videos are not sent to a vLLM"),
    ],
)
def test_images_that_a_server_cannot_be_sent_end_the_run(ask, context, render, sentence):
    with pytest.raises(ServerSetupError, match=sentence):
        ask(Looker(), {-4: image(), -3: image()}, [1, *context], **{RENDER: render})


def test_a_sample_with_the_token_of_an_image_is_drawn_again(tokenizer, start):
    drawn = {}

    def complete(number, body):
        drawn[body["seed"]] = body["stop_token_ids"]
        return completion(5, TOKEN) if number < 2 else completion(5, 6)

    client = client_of(tokenizer, start(complete), media_tokens={IMAGE: TOKEN})

    async def go():
        try:
            return await client.generate([1, 2], SAMPLING, "")
        finally:
            await client.close()

    assert run(go()).ids == [5, 6] and list(drawn.values()) == [[TOKEN]] * 3
