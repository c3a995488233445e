"""
The client of dedicated vLLM servers: an `Engine` over HTTP, token ids in and token ids out. All conversations of a
group are placed on one server, so that its prefix cache helps them. Images go to it as the trainer's processor made
them, named by their content, and once.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import io
import os
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import orjson
import torch
from torch import Tensor

from mt_grpo.errors import EngineError
from mt_grpo.forward.media import Media, MediumInputs
from mt_grpo.media import IMAGE, SOUND, VIDEO, kind_of, to_file
from mt_grpo.rollout.engines import Sample, SamplingParams
from mt_grpo.servers.cache_scheduler import Turn
from mt_grpo.servers.fleet import Owner, VLLMServers
from mt_grpo.servers.http import RequestFailed, Server, ServerSetupError, find_in, router_words
from mt_grpo.token_tree import Routes

_GENERATE = "/inference/v1/generate"
_RENDER = "/v1/chat/completions/render"
_SIDE = 64  # pixels of the image by which a server is asked how it takes images
_NOT_SENT = {VIDEO: ("Videos", "frames as images"), SOUND: ("Sounds", "a transcript as text")}
_RAW = 3  # vLLM's number for bytes of a tensor in msgpack
_names: weakref.WeakKeyDictionary[MediumInputs, str] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Field:
    """How vLLM takes one input of an image."""

    dtype: str
    kind: str
    options: dict[str, Any]


@dataclass(frozen=True)
class _Shown:
    """An image in a context: its name, its place, and what the model takes."""

    name: str
    offset: int
    image: MediumInputs


@dataclass(frozen=True)
class _Layout:
    """How a server takes images, as its own rendering of one shows."""

    fields: dict[str, _Field]

    @classmethod
    def read(cls, answer: Any) -> _Layout:
        """The layout in a server's rendering of a message with one image."""
        msgpack = _msgpack()
        (content,) = answer["features"]["kwargs_data"]["image"]
        item = msgpack.decode(base64.b64decode(content), ext_hook=lambda code, data: None)
        return cls({name: _Field(each["data"][0], *each["field"]) for name, each in item.items()})

    def write(self, image: MediumInputs) -> str:
        """An image as vLLM reads it."""
        msgpack = _msgpack()
        if image.inputs.keys() != self.fields.keys():
            raise ServerSetupError(
                f"vLLM takes {', '.join(sorted(self.fields))} of an image, and the trainer's processor returns "
                f"{', '.join(sorted(image.inputs))}: sample with the model itself (`use_vllm: false`)."
            )
        item = {}
        for name, field in self.fields.items():
            dtype, tensor = getattr(torch, field.dtype), image.inputs[name]
            if tensor.is_floating_point() and not dtype.is_floating_point:
                raise ServerSetupError(
                    f"vLLM takes `{name}` of an image as {field.dtype}, before they are normalized: start it with "
                    "`mt-grpo serve`, or with `--no-mm-device-do-normalize`."
                )
            tensor = tensor.to(dtype)
            if field.kind == "batched":
                (tensor,) = tensor
            data = field.dtype, tuple(tensor.shape), msgpack.Ext(_RAW, _bytes_of(tensor))
            item[name] = {"data": data, "field": (field.kind, field.options)}
        return base64.b64encode(msgpack.encode(item)).decode()


def _msgpack() -> Any:
    """The library of vLLM's own format."""
    try:
        import msgspec
    except ImportError:
        raise ServerSetupError(
            "Images for a vLLM server are written with msgspec, which is not installed: `pip install "
            "'mt-grpo[images]'`."
        ) from None
    return msgspec.msgpack


def _layout_request(model: str) -> dict[str, Any]:
    """The body that asks a server to render an image. It is another one each time: one that it knows comes empty."""
    from PIL import Image

    image = Image.frombytes("RGB", (_SIDE, _SIDE), os.urandom(3 * _SIDE**2))
    url = f"data:image/png;base64,{base64.b64encode(to_file(image)).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": content}], **({"model": model} if model else {})}


def _shown_in(context: list[int], images: Media) -> list[_Shown]:
    """The images whose tokens, of ids below 0, stand in a context, in order."""
    found, index = list[_Shown](), 0
    while index < len(context):
        token = context[index]
        if token >= 0:
            index += 1
            continue
        if kind_of(token) != IMAGE:
            kind, instead = _NOT_SENT[kind_of(token)]
            raise ServerSetupError(
                f"{kind} are not sent to a vLLM server: sample with the model itself (`use_vllm: false`), or show "
                f"{instead}."
            )
        image = images[token]
        if context[index : index + image.size] != [token] * image.size:
            raise ServerSetupError(
                "vLLM's endpoint for token ids takes images whose tokens stand together, and those of this model have "
                "others between them: sample with the model itself (`use_vllm: false`)."
            )
        found.append(_Shown(_name_of(image), index, image))
        index += image.size
    return found


def _name_of(image: MediumInputs) -> str:
    """The name of an image by what the model takes of it: 32 hexadecimal digits."""
    name = _names.get(image)
    if name is None:
        content = blake2b(digest_size=16)
        for key, tensor in sorted(image.inputs.items()):
            content.update(f"{key} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            content.update(_bytes_of(tensor))
        name = _names[image] = content.hexdigest()
    return name


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _features_of(shown: Iterable[_Shown], layout: _Layout | None = None) -> dict[str, Any]:
    """The images of a request, with a layout in full, and else by their names."""
    shown = list(shown)
    return {
        "mm_hashes": {"image": [each.name for each in shown]},
        "mm_placeholders": {"image": [{"offset": each.offset, "length": each.image.size} for each in shown]},
        "kwargs_data": {"image": [None if layout is None else layout.write(each.image) for each in shown]},
    }


T = TypeVar("T")
_Body = Callable[[Server, int], Awaitable[bytes]]
"""Makes the body of an attempt, for a server and after so many failures."""
Content = Callable[[Server, int, SamplingParams], Awaitable[bytes]]
"""Makes that of a sample."""
_COMPLETIONS = "/v1/completions"
_TOKEN_TIME = 0.1  # most seconds that a busy server takes per sampled token
_LONGEST_BACKOFF = 8.0
_ATTEMPTS = 8
_OF_CONFIGURATION = "vllm-"  # how vLLM's own fingerprint begins, which a restarted server has again
_ANOTHER = 0x9E3779B9  # torch's generator on a CPU knows 32 bits of a seed


class VLLMServerClient(VLLMServers):
    """
    Samples from vLLM servers. A failed request is repeated if that can help: sampling changes nothing on a server.
    """

    async def generate(self, context: list[int], sampling: SamplingParams, session: str) -> Sample:
        """Samples one action; see `Engine`. `sampling.max_tokens` must be set."""

        async def content(server: Server, failures: int, drawing: SamplingParams) -> bytes:
            return _completion_request(self.model, context, drawing, **self.salt)

        return await self._sample(session, context, sampling, content, _COMPLETIONS)

    async def generate_with_media(
        self, context: list[int], media: Media, sampling: SamplingParams, session: str
    ) -> Sample:
        """Samples one action; see `MediaEngine`. Raises as `generate`, or `ServerSetupError` as `_layout`."""
        shown = _shown_in(context, media)
        if not shown:
            return await self.generate(context, sampling, session)
        ids = [self.media_tokens[kind_of(token)] if token < 0 else token for token in context]

        async def content(server: Server, failures: int, drawing: SamplingParams) -> bytes:
            layout = await self._layout(server)
            if failures:  # the server may have forgotten an image
                server.images.clear()
            else:
                await self._hand_over(server, layout, shown)
            features = _features_of(shown, layout if failures else None)
            return _generate_request(self.model, ids, drawing, features, **self.salt)

        return await self._sample(session, context, sampling, content, _GENERATE)

    async def _sample(
        self, session: str, context: list[int], sampling: SamplingParams, content: Content, path: str
    ) -> Sample:
        """Samples until there is no token of an image in the sample: no image would stand behind it."""
        # some models name a token for what they do not take, which is none of their vocabulary
        never = tuple(token for token in self.media_tokens.values() if token < len(self.tokenizer))
        if not never:
            return await self._sample_once(session, context, sampling, content, path)
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *never))
        for attempt in range(_ATTEMPTS):
            another = replace(sampling, seed=sampling.seed ^ attempt * _ANOTHER)
            sample = await self._sample_once(session, context, another, content, path)
            if not set(never) & set(sample.ids):
                return sample
        raise EngineError(
            f"The model wrote the token of an image {_ATTEMPTS} times, behind which no image would stand."
        )

    async def _sample_once(
        self, session: str, context: list[int], sampling: SamplingParams, content: Content, path: str
    ) -> Sample:
        assert sampling.max_tokens is not None
        versions: list[int | None] = []  # when the request was sent, at the latest attempt

        async def noted(server: Server, failures: int) -> bytes:
            body = await content(server, failures, sampling)
            versions[:] = [self.weight_version]
            return body

        async with self._turn(session, context) as turn:
            sample = await self._ask(
                session,
                context,
                noted,
                functools.partial(_read_sample, routes_from=sampling.routes_from, path=path),
                _TOKEN_TIME * sampling.max_tokens,
                path,
            )
            turn.sampled = len(sample.ids)
        (sample.weight_version,) = versions
        last = self.weight_version if self.incoming_version is None else self.incoming_version
        sample.last_weight_version = last
        return sample

    @asynccontextmanager
    async def _turn(self, session: str, context: list[int]) -> AsyncIterator[Turn]:
        """Waits until there is room for a conversation's turn in the cache of its server."""
        if not self.by_cache:
            yield Turn()
            return
        async with self._under_way() as wire:
            while True:
                server = await self._server(session, context)
                gate = wire.gate(server, self._schedulers[server.url])
                try:
                    async with gate.turn(session, len(context)) as turn:
                        if server.up:
                            yield turn
                            return
                finally:
                    if not server.up:
                        gate.leave(session)

    async def _layout(self, server: Server) -> _Layout:
        """How a server takes images; it is asked once."""
        if server.layout is None:
            body = orjson.dumps(_layout_request(self.model))
            try:
                answer = await self._call(server, "POST", _RENDER, body)
                server.layout = find_in(answer, _Layout.read, f"POST {server.url}{_RENDER}")
            except RequestFailed as error:
                if error.status not in (403, 404):
                    raise
                raise server.setup_error(
                    "is given tokens of text only, and a conversation shows an image: start it with `mt-grpo serve`, "
                    "or with `--enable-scale-out`."
                ) from error
        return server.layout

    async def _hand_over(self, server: Server, layout: _Layout, shown: list[_Shown]) -> None:
        """Sends images that a server was not sent before. Conversations that show one of them meanwhile wait."""
        sending = self._connection().images
        for each in shown:
            if each.name in server.images:
                continue
            if (server.url, each.name) not in sending:
                task = asyncio.ensure_future(self._send_image(server, layout, each))
                sending[server.url, each.name] = task
                task.add_done_callback(functools.partial(_sent, sending, server.url, each.name))
            await asyncio.shield(sending[server.url, each.name])

    async def _send_image(self, server: Server, layout: _Layout, shown: _Shown) -> None:
        """Has a server look at an image, which it then knows by its name: it keeps those of a request."""
        alone = _Shown(shown.name, 0, shown.image)
        ids = [self.media_tokens[IMAGE]] * shown.image.size
        sampling = SamplingParams(max_tokens=1)
        body = _generate_request(self.model, ids, sampling, _features_of([alone], layout), **self.salt)
        await self._call(server, "POST", _GENERATE, body)
        server.images.add(shown.name)

    @property
    def salt(self) -> dict[str, str]:
        """What keeps a request from prefixes that were cached with other weights than those of its own beginning."""
        return {"cache_salt": Owner.label(self.run, self.weight_version or 0)} if self.salted else {}

    async def logprobs(self, context: list[int], tokens: list[int], session: str) -> list[float]:
        """Log-probs of given tokens; see `ScoringEngine`. Raises as `generate`."""

        async def one(number: int) -> float:
            given, token = context + tokens[:number], tokens[number]

            async def content(server: Server, failures: int) -> bytes:
                # a request for the log-probs of all tokens (`prompt_logprobs`) would not read the prefix cache
                more = {"logprob_token_ids": [token], **self.salt}
                return _completion_request(self.model, given, SamplingParams(max_tokens=1), seed=None, **more)

            return await self._ask(
                session, given, content, lambda answer, request: _read_logprob(answer, token, request)
            )

        return list(await asyncio.gather(*map(one, range(len(tokens)))))

    def join(self, session: str, other: str) -> None:
        """Places a conversation on the server of another; see `PlacingEngine`."""
        self.placement.join(session, other)

    def release(self, session: str) -> None:
        """Forgets which server served the conversation."""
        self.placement.release(session)
        for gate in self._wire.gates.values() if self._wire is not None else ():
            gate.leave(session)

    async def _ask(
        self,
        session: str,
        context: list[int],
        content: _Body,
        read: Callable[[Any, str], T],
        more: float = 0.0,
        path: str = _COMPLETIONS,
    ) -> T:
        """Asks for a completion until `read` can read the answer, for `more` seconds longer than usual."""
        async with self._under_way() as wire, wire.places:
            failures = 0
            while True:
                server = await self._server(session, context)
                drops = server.drops
                try:
                    limit = self.request_timeout + more
                    body = await content(server, failures)
                    answer, name = await server.ask_identified(self._connection().http, "POST", path, body, limit)
                    found = read(answer, f"POST {server.url}{path}")
                    if name is None and (path == _COMPLETIONS or self.weight_version is not None):
                        name = _identity(server, answer)
                    fingerprint = name or server.fingerprint
                    restarted = server.fingerprint not in (None, fingerprint)
                    if name is not None and name.startswith(_OF_CONFIGURATION):  # of any process that is started so
                        restarted |= not await self._has_weights(server)
                except RequestFailed as error:
                    # 404: of a server that was restarted and knows no adapter, or of a proxy while it starts
                    passes = error.repeat or error.status == 404
                    if passes and server.up and not await self._serves(server):
                        server.drop(str(error))
                    if (server.up and not passes) or failures == self.max_retries:
                        raise
                    failures += 1
                    if server.up:
                        await asyncio.sleep(min(_LONGEST_BACKOFF, 0.25 * 2**failures))
                    continue
                if server.drops != drops:  # left out meanwhile: what it sampled may come from other weights
                    continue
                if fingerprint in server.past:
                    raise ServerSetupError(router_words(server.url, "is several servers in turn, as behind a router"))
                if restarted:  # between two requests, without its weights
                    if server.fingerprint not in (None, fingerprint):
                        server.past.add(str(server.fingerprint))
                    server.drop(f"The server at {server.url} was restarted.")
                    continue
                server.fingerprint = fingerprint
                return found


def _identity(server: Server, answer: dict[str, Any]) -> str:
    """The identity in an answer, by which restarts and routers are noticed; else `ServerSetupError`."""
    found = answer.get("system_fingerprint")
    if not isinstance(found, str) or not found:
        raise ServerSetupError(
            f"The answers of {server.url} have no `system_fingerprint`, so that nobody can tell which server gave "
            "them, and with which weights: start the server with `mt-grpo serve`, or without `--fingerprint-mode "
            "none`, and name it itself, not a router before it."
        )
    return found


def _sent(
    sending: dict[tuple[str, str], asyncio.Future[None]], url: str, name: str, done: asyncio.Future[None]
) -> None:
    del sending[url, name]
    if not done.cancelled():
        done.exception()  # told to the conversations that waited, if they still do


def _completion_request(model: str, context: list[int], sampling: SamplingParams, **more: object) -> bytes:
    """The body that samples one action; it sets every option, so that no default of the server applies."""
    body = {
        **_sampling_options(sampling),
        "model": model,
        "prompt": context,
        # ids come with the log-probabilities; `return_token_ids` would send the whole prompt back as well
        "return_tokens_as_token_ids": True,
    }
    return orjson.dumps(body | more)


def _generate_request(
    model: str, ids: list[int], sampling: SamplingParams, features: dict[str, Any], **more: object
) -> bytes:
    """The body that samples one action after ids with images among them: `features`, see `_features_of`."""
    body = {"token_ids": ids, "features": features, "sampling_params": _sampling_options(sampling), **more}
    return orjson.dumps(body | ({"model": model} if model else {}))


def _sampling_options(sampling: SamplingParams) -> dict[str, Any]:
    """vLLM's options for one action, with its log-probabilities."""
    options = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 0,
    }
    if sampling.routes_from:
        options["routed_experts_prompt_start"] = sampling.routes_from
    return options


def _read_sample(answer: Any, request: str, routes_from: int = 0, path: str = _COMPLETIONS) -> Sample:
    """The sample in an answer of one of the two paths, with routes from the context's token `routes_from` on."""
    try:
        choice = answer["choices"][0]
        found = choice["logprobs"]
        if path == _COMPLETIONS:
            ids = [int(token.removeprefix("token_id:")) for token in found["tokens"]]
            logprobs = [float(value) for value in found["token_logprobs"]]
        else:
            ids = [int(token) for token in choice["token_ids"]]
            logprobs = [float(each["logprob"]) for each in found["content"]]
        reason = choice["finish_reason"]
        routes = _read_routes(choice.get("routed_experts"), routes_from)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        shown = str(answer)[:400]
        raise RequestFailed(
            f"{request} was answered with something that is not a completion: {shown}", True
        ) from error
    if reason not in ("stop", "length") or not ids or len(ids) != len(logprobs):
        raise RequestFailed(
            f"{request} was answered with {len(ids)} tokens, {len(logprobs)} log-probabilities and the finish reason "
            f"{reason!r}.",
            True,
        )
    return Sample(ids, logprobs, reason, routes=routes)


def _read_routes(encoded: str | None, first: int) -> Routes | None:
    """The routes of a choice: an array `(tokens, layers, k)` as a `.npy` file in base64. Raises `ValueError`."""
    if not encoded:
        return None
    found = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    return Routes(first, found[:1].nbytes, found.tobytes()) if len(found) else None


def _read_logprob(answer: Any, token: int, request: str) -> float:
    """The log-prob in an answer."""
    try:
        return float(answer["choices"][0]["logprobs"]["top_logprobs"][0][f"token_id:{token}"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        shown = str(answer)[:400]
        raise RequestFailed(f"{request} was answered without the log-prob of token {token}: {shown}", True) from error
