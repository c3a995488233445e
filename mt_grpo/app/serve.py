"""
`mt-grpo serve`: becomes the vLLM server that a recipe's trainer needs, or starts several; or becomes one that serves
what a run trained, to anybody who speaks OpenAI's API. `mt-grpo chat`: what a run trained in the environment that it
was trained in, with a person in the terminal who asks.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from rich.console import Console
from rich.text import Text
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from trl import get_quantization_config
from trl.chat_template_utils import add_response_schema

from mt_grpo.app.build import Recipe
from mt_grpo.app.commands import server_vllm
from mt_grpo.app.request import Request
from mt_grpo.concurrency import in_waiting_thread, run
from mt_grpo.envs import EnvSource, MultiTurnToolEnv
from mt_grpo.envs.env import Env, Outcome, Policy, Step
from mt_grpo.envs.source import source_of, tool_arguments
from mt_grpo.envs.tool_env import DialogueEnv
from mt_grpo.errors import MISREAD, ConfigError, EngineError, libraries_may_refuse
from mt_grpo.forward.media import media_tokens
from mt_grpo.forward.probe import context_length
from mt_grpo.options.rules import check_served
from mt_grpo.options.table import OF_ENVIRONMENT
from mt_grpo.options.values import HAS_A_USER, env_type
from mt_grpo.rollout import Engine, RolloutLimits, RolloutRequest, RolloutRunner, derive_seed
from mt_grpo.rollout.engines.transformers import TransformersEngine
from mt_grpo.rollout.engines.vllm import VLLMServerClient
from mt_grpo.servers import EVERYWHERE, expand_addresses, host_url, is_local
from mt_grpo.servers.http import open_session
from mt_grpo.servers.start import Replica, check_keys, run_replicas, share_gpus, vitals
from mt_grpo.tools.function import cut
from mt_grpo.training.checkpoint import adapter_settings
from mt_grpo.training.config import MTGRPOConfig, changed
from mt_grpo.training.environment import build_env, prepare_tokenizer
from mt_grpo.training.forward_plan import sampling_params
from mt_grpo.training.model import load_policy, resolve_base, resolve_model, source_options, subfolder_of
from mt_grpo.training.servers import check_vllm, command_at, cpu_defaults, interpreter, server_dtype, visible_gpus
from mt_grpo.training.step_log import serving
from mt_grpo.trajectory import Message, Row, StopReason, Trajectory, Turn, visible
from mt_grpo.weights.files import LoraTransport


def server_command(recipe: Recipe) -> tuple[list[str], dict[str, str]]:
    """The command that starts a recipe's server, and the environment variables it needs; see `command_at`."""
    host, port = _addresses(recipe.training, None)[0]
    return command_at(host, port, recipe.training, recipe.model)


def serve(recipe: Recipe, request: Request) -> int:
    """Prints the command of a server and becomes it; of several waits for the end, and tells Prometheus of them."""
    args, replicas, metrics_address = recipe.training, request.own["replicas"], request.own["metrics_address"]
    if request.run is not None and replicas is not None:
        raise ConfigError("`--replicas` starts servers for a trainer: for a trained model start one on each port.")
    if request.run is None:
        check_served(vars(args))
        check_keys()
    addresses = _addresses(args, replicas)
    if request.run is not None or len(addresses) == 1:
        if metrics_address is not None:
            raise ConfigError(
                "`--metrics_address` says which of several servers live (`--replicas`): one has metrics of its own, "
                "at `/metrics`."
            )
        command, environment, *words = (
            server_command(recipe) if request.run is None else _trained_command(recipe, request.run)
        )
        print(Replica("", command, environment).line, flush=True)
        for line in words:
            print(f"mt-grpo: {line}", file=sys.stderr, flush=True)
        _check_vllm()
        os.execve(command[0], command, {**os.environ, **environment})
        return 1
    found = []
    shares = _shares(args, len(addresses))
    for (host, port), share in zip(addresses, shares, strict=True):
        command, environment = command_at(host, port, args, recipe.model)
        found.append(Replica(host_url(host, port), command, environment | share))
    if not expand_addresses(args.vllm_server_base_url or [], "vllm_server_base_url"):
        host, first = addresses[0]
        host = "THIS_MACHINE" if host in EVERYWHERE else f"[{host}]" if ":" in host else host
        print(f"The trainer finds them with `--vllm_server_base_url http://{host}:[{first}-{addresses[-1][1]}]`.")
    _check_vllm()
    if metrics_address is None:
        return run_replicas(found)
    with serving(metrics_address, "server", lambda: vitals(found)):
        return run_replicas(found, listens=True)


def _check_vllm() -> None:
    """Whether servers can be started; an unknown version of vLLM is named, and used."""
    check_vllm()
    found, mend = server_vllm()
    if mend:
        print(f"mt-grpo: {found}: {mend}.", file=sys.stderr, flush=True)


_PARSERS = {
    "<function=": "qwen3_coder",
    "<tool_call>(?P<name>": "glm45",
    "<tool_call>": "hermes",
    "<|tool_call_start|>": "lfm2",
    "<|tool_call>": "gemma4",
    "<|channel|>commentary": "openai",
    '"parameters"': "llama3_json",
}
"""vLLM's parsers of tool calls, by what begins a call in a response template; the first that is there."""


def _trained_command(recipe: Recipe, run: str) -> tuple[list[str], dict[str, str], str]:
    """The command that serves a recipe's model to clients of OpenAI's API, its environment, and words for clients."""
    args, model = recipe.training, recipe.model
    name = resolve_model(model.model_name_or_path)
    ((host, port),) = _addresses(args, 1)
    served, base, settings = _served_name(name), resolve_base(name), adapter_settings(name)
    command = [
        *(str(interpreter()), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", base, "--served-model-name", f"{served}-base" if settings else served),
        *("--host", host, "--port", str(port), "--dtype", server_dtype(args, model)),
        *("--tensor-parallel-size", str(args.vllm_tensor_parallel_size)),
    ]
    environment = {"VLLM_NO_USAGE_STATS": "1"}
    if settings is not None:
        config = AutoConfig.from_pretrained(base, trust_remote_code=args.trust_remote_code)
        _check_adapter(settings, run, Path(name, "adapter_model.safetensors") if media_tokens(config) else None)
        model.lora_r = settings["r"]
        flags, _ = LoraTransport.server_flags(model)
        command += [*flags, "--lora-modules", f"{served}={name}", "--tokenizer", name]
    if args.vllm_max_model_length:
        command += ["--max-model-len", str(args.vllm_max_model_length)]
    if args.trust_remote_code:
        command.append("--trust-remote-code")
    if args.chat_template_kwargs:
        command += ["--default-chat-template-kwargs", json.dumps(args.chat_template_kwargs)]
    if args.use_cpu or not torch.cuda.is_available():
        command += ["--enforce-eager", "--no-enable-chunked-prefill"]
        environment |= {name: os.environ.get(name, value) for name, value in cpu_defaults().items()}
    url = host_url(host, port)
    words = [f"{served!r} will be at {url}/v1."]
    if not os.environ.get("VLLM_API_KEY"):
        words.append("Who reaches the port may use it, unless `VLLM_API_KEY` is set.")
    protocol = args.call_protocol or ("tags" if env_type(vars(args)) in HAS_A_USER else "native")
    loop = f"`mt-grpo chat {shlex.quote(run)} --server {url}` does this, with the run's tools."
    if protocol == "native":
        parser = _parser_of(name, args)
        if parser is None:
            words.append(
                "No parser of vLLM is known for the tool calls of its chat template: start the command above with "
                "`--enable-auto-tool-choice --tool-call-parser NAME`, if vLLM has one."
            )
        else:
            command += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
        words.append(f"A client sends system prompt and tools, and runs the calls. {loop}")
    elif protocol.endswith("tags"):
        words.append(
            "It calls tools by tags in its text, which vLLM does not read. A client sends the system prompt of the "
            'training, with `"stop": ["</tool>", "</answer>"]` and `"include_stop_str_in_output": true`, runs the '
            f"call and sends `<result>...</result>` as the user's next message. {loop}"
        )
    return command, environment, " ".join(words)


def _check_adapter(settings: dict[str, Any], run: str, weights: Path | None) -> None:
    """Refuses an adapter that vLLM cannot put on its base; `weights` are looked into for layers that see or hear."""
    unknown = [name for name in ("modules_to_save", "use_dora", "target_parameters") if settings.get(name)]
    of_text = re.compile(r"\.(language_model|text_model|lm_head)\.")
    if weights is not None:
        with safe_open(weights, "pt") as file:
            if not all(map(of_text.search, file.keys())):
                unknown.append("layers that see or hear")
    if settings.get("peft_type") != "LORA" or unknown:
        raise ConfigError(
            f"vLLM takes no adapter with {', '.join(unknown) or settings.get('peft_type')}: run "
            f"`{shlex.join(['mt-grpo', 'merge', run])}` and `{shlex.join(['mt-grpo', 'serve', f'{run}/merged'])}`."
        )


def _parser_of(name: str, args: MTGRPOConfig) -> str | None:
    """vLLM's name for what reads the tool calls of a model's chat template; `None` where none is known."""
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=args.trust_remote_code)
    if tokenizer.response_template is None:
        with suppress(ValueError):
            add_response_schema(tokenizer)
    calls = ((tokenizer.response_template or {}).get("fields") or {}).get("tool_calls") or {}
    begins = (calls.get("open") or calls.get("open_pattern") or "").replace("\\", "")
    return next((parser for text, parser in _PARSERS.items() if text in begins), None)


def _addresses(args: MTGRPOConfig, replicas: int | None) -> list[tuple[str, int]]:
    """Hosts and ports of the servers that are started here."""
    urls = expand_addresses(args.vllm_server_base_url or [], "vllm_server_base_url")
    if not urls:
        host, first = args.vllm_server_host.strip("[]"), args.vllm_server_port
        if first + (replicas or 1) > 2**16:
            raise ConfigError(
                f"`--replicas {replicas}` takes ports from `vllm_server_port: {first}` on, and the last one is 65535: "
                "begin with a lower one."
            )
        return [(host, port) for port in range(first, first + (replicas or 1))]
    parts = [urlsplit(url) for url in urls]
    if not all(is_local(part.hostname) for part in parts):
        raise ConfigError(
            f"`vllm_server_base_url: {', '.join(args.vllm_server_base_url)}` names servers on other machines: start "
            "each on its own machine, with `--vllm_server_base_url ''`, `--vllm_server_host` and `--vllm_server_port`."
        )
    if replicas is not None and replicas > len(parts):
        raise ConfigError(
            f"`--replicas {replicas}` starts more servers than `vllm_server_base_url` names, {len(parts)}: name the "
            "others too, or leave `--replicas` out."
        )
    return [(str(part.hostname), part.port or 80) for part in parts][:replicas]


def _shares(args: MTGRPOConfig, servers: int) -> list[dict[str, str]]:
    """What of the machine each of several servers gets, as environment variables."""
    if args.use_cpu or not torch.cuda.is_available():
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (torch.get_num_threads() - 1) // servers))
        return [{"OMP_NUM_THREADS": threads}] * servers
    shares = share_gpus(servers, args.vllm_tensor_parallel_size, visible_gpus())
    return [{"CUDA_VISIBLE_DEVICES": gpus} for gpus in shares]


_LONGEST_RESULT = 2_000  # characters of a tool's result that are shown
_DIALOGUES = ("simulated_user", "interaction_config_file")
"""Options whose environments have somebody who answers, in whose place the person is."""


def chat(recipe: Recipe, server: str | None = None) -> int:
    """Talks until the end of the input or `/quit`."""
    args = changed(recipe.training, model_init_kwargs=recipe.init_options())
    source = _environment(args)
    revision = recipe.model.model_revision
    name = resolve_model(recipe.model.model_name_or_path, revision, subfolder_of(args))
    with libraries_may_refuse(f"The model {name!r} cannot be loaded", *MISREAD):
        tokenizer = AutoTokenizer.from_pretrained(name, **source_options(args, revision))
        prepare_tokenizer(tokenizer, source)
        engine = _local(name, recipe, args, tokenizer) if server is None else _at_server(server, name, args, tokenizer)
    limits = RolloutLimits(max_turn_tokens=args.max_turn_length or args.max_completion_length)
    person = _Person(Console(soft_wrap=True, highlight=False))

    def begin(row: Row) -> Env:
        return _Chat(source, person)

    runner = RolloutRunner(begin, engine, limits, args.chat_template_kwargs, args.history, args.compact_every)
    person.greet(source)
    number = 0
    while (said := person.ask()) is not None or not person.gone:
        if said is None:
            continue
        request = RolloutRequest(said, f"chat-{number}", seed=derive_seed(args.seed, "chat", number))
        (trajectory,) = run(runner.run([request], sampling_params(args)))
        person.tell_end(trajectory)
        number += 1
        if person.gone:
            break
    return 0


def _environment(args: MTGRPOConfig) -> EnvSource:
    """The environment of a run, without the user that it simulates."""
    options = {name: getattr(args, name) for name in OF_ENVIRONMENT}
    if any(options[name] is not None for name in _DIALOGUES):
        return source_of(_Listens(**tool_arguments(options)))
    env = build_env(args)
    if isinstance(env, dict):
        if len(env) > 1:
            raise ConfigError(
                f"The run has several environments, {', '.join(env)}: leave one, as with `--environments "
                "'{NAME: {tools: [...]}}'`."
            )
        (env,) = env.values()
    source = source_of(env)
    found = source.prototypes()
    if not found or not isinstance(found[0], MultiTurnToolEnv):
        raise ConfigError(
            "`mt-grpo chat` is for environments in which the model answers a user, with tools or without, and this "
            "run's asks by itself: `mt-grpo rollout` shows what the agent does in it."
        )
    return source


def _local(name: str, recipe: Recipe, args: MTGRPOConfig, tokenizer: PreTrainedTokenizerBase) -> Engine:
    """Samples from the model in this process; an adapter is put on its base."""
    model = load_policy(name, args, get_quantization_config(recipe.model))
    return TransformersEngine(model.eval(), tokenizer)


def _at_server(url: str, name: str, args: MTGRPOConfig, tokenizer: PreTrainedTokenizerBase) -> Engine:
    """Samples from the vLLM server at an address, which takes and gives token ids."""
    client = VLLMServerClient(url.rstrip("/").removesuffix("/v1"), tokenizer, by_cache=False, server_timeout=20.0)
    client.remedy = "Start it with `mt-grpo serve RUN`."
    (server,) = client.servers

    async def models() -> list[dict[str, Any]]:
        async with open_session() as http:
            return list((await server.ask(http, "GET", "/v1/models"))["data"])

    try:
        found = run(models())
        served = {entry["id"]: entry.get("max_model_len") for entry in found}
    except (EngineError, KeyError, TypeError) as error:
        raise ConfigError(f"There is no vLLM server at {url} ({error}): start it with `mt-grpo serve RUN`.") from error
    ours = _served_name(name) if _served_name(name) in served else next(iter(served), "")
    if not ours or (ours != _served_name(name) and len(served) > 1):
        raise ConfigError(
            f"The server at {url} has the models {', '.join(served)}, and not {_served_name(name)!r}: start it with "
            "`mt-grpo serve` and the same folder."
        )
    config = AutoConfig.from_pretrained(resolve_base(name), **source_options(args))
    client.model, client.context_length = ours, served[ours] or context_length(config)
    return client


def _served_name(name: str) -> str:
    """What a server calls the model of a folder; one of the Hub keeps its name."""
    path = Path(name)
    return path.resolve().name if path.is_dir() else name


class _Listens(DialogueEnv):
    """A dialogue whose other side is asked by who holds the conversation."""

    async def respond(self, turn: Turn) -> Step:
        return Step(done=StopReason.ENV_DONE)


class _Person:
    """Who asks: what was typed, and what is shown."""

    def __init__(self, console: Console) -> None:
        self.gone = False
        self._console, self._status = console, console.status("")
        self._typed = console.is_terminal and sys.stdin.isatty()

    def greet(self, source: EnvSource) -> None:
        """Says what there is, to who types."""
        env = source.prototypes()[0]
        tools = ", ".join(env.tools) if isinstance(env, MultiTurnToolEnv) else ""
        if self._typed:
            self._say(f"The agent's tools: {tools or 'none'}. /reset begins anew, /quit ends.", "bright_black")

    def ask(self) -> str | None:
        """The next words that say something; `None` for `/reset` and for the end, after which the person is `gone`."""
        self._status.stop()
        while True:
            try:
                said = input("> " if self._typed else "").strip()
            except (EOFError, KeyboardInterrupt):
                said = "/quit"
                if self._typed:
                    print()
            if said in ("/quit", "/reset"):
                self.gone = said == "/quit"
                return None
            if said.startswith("/"):
                self._say(f"{said.split()[0]} is no command; /reset and /quit are.", "red")
            elif said:
                return said

    def wait(self) -> None:
        """The model or a tool works."""
        if self._typed:
            self._status.start()

    def show_turn(self, turn: Turn) -> None:
        """What the model wrote, and the calls that it makes."""
        self._status.stop()
        thought = " ".join(filter(None, (turn.message.get(name) for name in ("reasoning_content", "thinking"))))
        words = _MARKS.sub("", _BLOCKS.sub("", turn.text)).strip()
        if thought or (words and words != turn.answer):
            self._say(f"{thought}\n{words}".strip(), "bright_black" if turn.tool_calls or turn.answer else "")
        for call in turn.tool_calls:
            arguments = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
            self._say(f"→ {call.name}({arguments})", "cyan")
        if turn.answer is not None:
            self._say(turn.answer, "bold")

    def show_results(self, turn: Turn) -> None:
        """What became of the calls of a turn, or why there were none."""
        self._status.stop()
        if turn.error:
            self._say(f"← {turn.error}", "red")
        for call in turn.tool_calls:
            self._say(f"← {cut(call.error or call.result, _LONGEST_RESULT)}", "red" if call.error else "bright_black")

    def tell_end(self, trajectory: Trajectory) -> None:
        """Why a conversation ended that the person did not end."""
        self._status.stop()
        reason = trajectory.stop_reason
        if self.gone or reason in (None, StopReason.ANSWERED):
            return
        words = trajectory.error or _ENDS.get(reason, f"the environment ended it ({reason.value})")
        self._say(f"The conversation is over: {visible(words).rstrip('.')}. What follows begins another.", "red")

    def _say(self, words: str, style: str) -> None:
        self._console.print(Text(visible(words), style=style))


_BLOCKS = re.compile(r"<(tool|tool_call|answer)>.*", re.DOTALL)
_MARKS = re.compile(r"</?(?:reasoning|think)>")
_ENDS = {
    StopReason.MAX_STEPS: "the agent has not answered in as many steps as it was trained with (`max_env_steps`)",
    StopReason.LENGTH: "a turn was cut at the length that it was trained with (`max_turn_length`)",
    StopReason.CONTEXT_FULL: "the model's context is full",
}


class _Chat(Env):
    """A conversation of the environment that the run trained in, which goes on with what the person says next."""

    def __init__(self, source: EnvSource, person: _Person) -> None:
        self._source, self._person = source, person
        self._env: Env | None = None

    async def run(self, policy: Policy, row: Row) -> Outcome:
        env = self._env = await self._source.make(row)
        assert isinstance(env, MultiTurnToolEnv)  # as its prototype is
        shown, steps = _Shown(policy, self._person), env.max_steps
        self._person.wait()
        outcome = await env.run(shown, row)
        while outcome.answer is not None:
            said = await in_waiting_thread(self._person.ask)
            if said is None:
                return Outcome(stop_reason=StopReason.ANSWERED)
            self._person.wait()
            env.max_steps = len(env.turns) + steps
            outcome = await env.resume(shown, [*shown.messages, {"role": "user", "content": said}])
        shown.finish()
        return outcome

    async def close(self) -> None:
        if self._env is not None:
            await self._env.close()


class _Shown(Policy):
    """A policy whose turns, and what became of their calls, are shown as they happen."""

    def __init__(self, policy: Policy, person: _Person) -> None:
        self._policy, self._person = policy, person
        self.session, self.tokenizer = policy.session, policy.tokenizer
        self.exhausted, self.sampled = policy.exhausted, policy.sampled
        self.messages: list[Message] = []
        self._latest: Turn | None = None

    async def reply(self, messages: Sequence[Message], *arguments: Any, **options: Any) -> Turn:
        self.finish()
        self._person.wait()
        turn = await self._policy.reply(messages, *arguments, **options)
        self.exhausted, self.sampled = self._policy.exhausted, self._policy.sampled
        self.messages, self._latest = [*messages, turn.message], turn
        self._person.show_turn(turn)
        self._person.wait()
        return turn

    def finish(self) -> None:
        """Shows the results of the latest turn."""
        if self._latest is not None:
            self._person.show_results(self._latest)
        self._latest = None
