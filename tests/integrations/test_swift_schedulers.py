"""Schedulers as people have them: their loop is kept, what is trained is what was sampled, nothing ends the run."""

import asyncio
import json
import logging
import threading
import time

import numpy as np
import pytest
import torch
from support.agents import check_whole
from support.conversations import play, user
from support.images import ScriptedSight, build_processor, picture
from support.models import build_model, build_tokenizer
from support.waiting import until_true

from mt_grpo.forward.model import ForwardPlan, enable_trees, score, score_turns
from mt_grpo.integrations.swift import (
    Env,
    MultiTurnScheduler,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    SchedulerSource,
    envs,
    multi_turns,
)
from mt_grpo.integrations.swift.scheduler import _with_images, without_images
from mt_grpo.rollout import EngineError
from mt_grpo.rollout.escaped_text import MediaEncoder
from mt_grpo.training.rollout_batch import row_tree
from mt_grpo.trajectory import StopReason, ToolCall

END = "<|im_end|>"


class Ask(MultiTurnScheduler):
    """Asks the next question, and returns what its row says beside it."""

    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append({"role": "user", "content": f"Q{current_turn + 1}"})
        return {"infer_request": infer_request}


class Extend(MultiTurnScheduler):
    """Writes into the assistant's message, and masks what it wrote."""

    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages[-1]["content"] += " Wait,"
        ids = response_choice.token_ids
        added = self.infer_engine.default_template.tokenizer.encode(" Wait,", add_special_tokens=False)
        mask = [0] + [1] * (len(ids) - 1) + [0] * len(added)
        return {"infer_request": infer_request, "response_token_ids": ids + added, "response_loss_mask": mask}


def hold(scheduler, answers, row=None, max_turns=3, loss_scale="all", sessions=1, timeout=5.0, **options):
    """Conversations of a scheduler: their trajectories, the runner, and the contexts as text."""
    source = SchedulerSource(scheduler, max_turns, loss_scale, timeout=timeout)
    trajectories, runner = play(source, answers, [row or {}] * sessions, keep=True, **options)
    contexts = [runner.engine.tokenizer.decode(context) for _, context, _ in runner.engine.requests]
    return trajectories if sessions > 1 else trajectories[0], runner, contexts


def said(*words):
    roles = ["user", "assistant"] * len(words)
    whole = "".join(f"<|im_start|>{role}\n{word}{END}\n" for role, word in zip(roles, words, strict=False))
    return f"{whole}<|im_start|>assistant\n"


def of_user(parts):
    return [{"role": "user", "content": parts}]


def talk(session, turn):
    return f"A{turn + 1}{END}"


def test_messages_go_on_until_there_are_enough_turns():
    trajectory, _, contexts = hold(Ask, talk)
    assert contexts == [said("Q1"), said("Q1", "A1", "Q2"), said("Q1", "A1", "Q2", "A2", "Q3")]
    assert (trajectory.stop_reason, trajectory.info) == (StopReason.MAX_STEPS, {"num_turns": 3})
    assert trajectory.tree.num_sequences == 1 and trajectory.error is None
    [(messages, _)] = trajectory.environment.records
    assert [message["content"] for message in messages] == ["Q1", "A1", "Q2", "A2", "Q3", "A3"]


def test_a_limit_ends_the_conversation():
    trajectory, _, _ = hold(Ask, lambda session, turn: "A B C D E F", max_turn_tokens=3)
    assert trajectory.stop_reason is StopReason.LENGTH and len(trajectory.turns) == 1
    trajectory, _, _ = hold(Ask, talk, max_turns=None, max_completion_tokens=60)
    assert trajectory.stop_reason is StopReason.TOKEN_BUDGET and trajectory.info["num_turns"] == len(trajectory.turns)


def test_masked_forks_have_the_log_probs_of_each_turn_alone():
    """The end of each turn that goes on is a fork, so masks are those of an action in two parts."""
    trajectory, runner, contexts = hold(Extend, talk)
    assert trajectory.tree.num_sequences > 1 and contexts[1] == said("Q1") + "A1 Wait,"
    assert [message["content"] for message in trajectory.environment.records[0][0]] == ["Q1", "A1 Wait,A2 Wait,A3"]
    assert [turn.mask for turn in trajectory.turns] == [[0, 1, 1], [0, 1, 1], None]
    row, model = runner.completion(trajectory), build_model(build_tokenizer()).double()
    ids, mask, turns = (torch.tensor([getattr(row, name)]) for name in ("ids", "mask", "turns"))
    actions = trajectory.tree.actions()
    for turn, action in enumerate(actions):
        own = (turns[0] == turn) & ~torch.tensor(row.logprobs).isnan()
        assert ids[0][own].tolist() == action
        assert mask[0][own].tolist() == (trajectory.turns[turn].mask or [1] * len(action))
    assert mask.sum() == sum(map(len, actions)) - 2
    enable_trees(model)
    plan = ForwardPlan([row_tree(row)])
    tree, alone = (torch.cat(way(model, plan).by_turn([len(actions)])[0]) for way in (score, score_turns))
    assert torch.allclose(tree.float(), alone, atol=1e-5) and len(tree) == mask.sum()


def returns(**extra):
    """A scheduler whose `step` returns more: values, or what makes them of the three sampled tokens."""

    class Returns(Ask):
        def step(self, infer_request, response_choice, current_turn):
            given = super().step(infer_request, response_choice, current_turn)
            ids = response_choice.token_ids
            return given | {name: value(ids) if callable(value) else value for name, value in extra.items()}

    return Returns


def two_more(ids):
    return [*ids, 5, 6]


RGB, ONES, FIVE = ("red", "blue"), [1, 1, 1, 0, 0], "`rollout_logprobs` has 5 entries and"


@pytest.mark.parametrize(
    ("ids", "given", "problem"),
    [
        (list, {"response_loss_mask": [1] * 4}, "`response_loss_mask` has 4 entries and `response_token_ids` has 3"),
        (None, {"response_loss_mask": [1]}, "`response_loss_mask` came without"),
        (list, {"response_loss_mask": [0.5] * 3}, "`response_loss_mask` has 0.5 at 0"),
        (two_more, {"response_loss_mask": [1] * 5}, "`response_loss_mask` trains token 3 of the 5 in `response_tok"),
        (two_more, {"response_loss_mask": ONES, "rollout_logprobs": [0.0] * 5}, f"{FIVE} the 1s of `response_loss_m"),
        (list, {"rollout_logprobs": [0.0] * 5}, f"{FIVE} `response_token_ids` has 3"),
        (None, {"rollout_logprobs": [0.0] * 5}, f"{FIVE} the sampled tokens are 3"),
        (None, {"reward": float("nan")}, "`reward` is nan"),
        (None, {"reward": "1.0"}, "`reward` is '1.0': return a finite number"),
        (None, {"rollout_infos": {"total_reward": "x", "step_rewards": []}}, "`total_reward` is 'x': return a finite"),
        (None, {"rollout_infos": "none"}, "`rollout_infos` is str"),
        (None, {"infer_request": None}, "`step` returned no `infer_request`"),
        (None, {"tool_calls": ["look"]}, "`tool_calls` has a str"),
    ],
)
def test_what_does_not_fit_is_an_error_with_turn_and_lengths(ids, given, problem):
    given = given if ids is None else {"response_token_ids": ids, **given}
    trajectory, _, _ = hold(returns(**given), talk)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and f"Turn 1: {problem}" in trajectory.error
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize(
    ("edited", "mask"), [(lambda ids: [*ids[:1], 7, 7], [1, 0, 0]), (lambda ids: np.array(ids[:2]), [1, 1, 0])]
)
def test_sampled_tokens_that_were_edited_away_are_not_trained(edited, mask):
    trajectory, runner, _ = hold(returns(response_token_ids=edited), talk, max_turns=2)
    assert trajectory.error is None and trajectory.turns[0].mask == mask
    assert sum(runner.completion(trajectory).mask) == sum(mask) + trajectory.turns[1].num_tokens


class Slow(Ask):
    def step(self, infer_request, response_choice, current_turn):
        time.sleep(1.0 * (current_turn == 2))
        return super().step(infer_request, response_choice, current_turn)


class Mixed(Ask):
    """Goes on in the same message after the second turn."""

    def step(self, infer_request, response_choice, current_turn):
        if current_turn == 1:
            return super().step(infer_request, response_choice, current_turn)
        infer_request.messages[-1]["content"] += " Wait,"
        return {"infer_request": infer_request}


class Own(MultiTurnScheduler):
    """A loop of its own that does what its row says; it blocks as files do."""

    async def ask(self, text, config):
        request = RolloutInferRequest(user(text))
        response = await self.infer_engine.infer_async(request, config)
        time.sleep(0.01)
        return response, request.messages

    async def run(self, infer_request, request_config, **kwargs):
        match infer_request.data_dict["kind"]:
            case "a record each":
                asked = [await self.ask(f"Q{number}", request_config) for number in (1, 2, 3)]
                ids = [response.choices[0].token_ids for response, _ in asked]
                return [RolloutOutput(*asked[at], ids[at], [1] * len(ids[at]), {"number": at}) for at in range(3)]
            case "two each":
                asked = [await self.ask(f"Q{number}", request_config) for number in range(4)]
                return [RolloutOutput(*asked[at]) for at in (1, 3)]
            case "the second":
                response = [await self.ask("Q", request_config) for _ in range(3)][1][0]
                return RolloutOutput(response, infer_request.messages, [response.choices[0].token_ids])
        response = await self.infer_engine.infer_async(infer_request, request_config)
        ids = response.choices[0].token_ids
        match infer_request.data_dict["kind"]:
            case "hangs":
                await asyncio.Event().wait()
            case "blocks":
                time.sleep(2)
            case "raises":
                raise ZeroDivisionError("in run")
            case "exits":
                raise SystemExit(3)
            case "hot":
                await self.infer_engine.infer_async(infer_request, RequestConfig(temperature=0.1))
            case "lengths":
                return RolloutOutput(response, [], [ids], [[1] * (len(ids) + 2)])
            case "turns":
                return RolloutOutput(response, [], [ids], [[1] * len(ids)] * 2)
            case "renames":  # as ms-swift's TreePO does
                response.id = infer_request.uuid + "-0/1-0"
                return [RolloutOutput(response=response, messages=infer_request.messages)]


@pytest.mark.parametrize(
    ("scheduler", "limits", "reason", "trained"),
    [
        (Ask, {}, StopReason.MAX_STEPS, [False, False, True]),
        (Slow, {"rollout_timeout": 0.3}, StopReason.TIMEOUT, [False, True]),
        (Mixed, {}, StopReason.MAX_STEPS, [False, True, True]),
        # a turn stands in the round of its record's end only where that goes on with it
        (Own, {}, StopReason.ENV_DONE, [False, True, False, True]),
    ],
)
def test_only_the_last_round_is_trained(scheduler, limits, reason, trained):
    trajectory, runner, _ = hold(scheduler, talk, {"kind": "two each"}, loss_scale="last_round", **limits)
    assert trajectory.stop_reason is reason
    assert [turn.mask for turn in trajectory.turns] == [None if whole else [0] * 3 for whole in trained]
    assert sum(runner.completion(trajectory).mask) == 3 * sum(trained)


def test_a_mask_goes_before_loss_scale(caplog):
    with caplog.at_level(logging.WARNING):
        trajectories, _, _ = hold(Extend, talk, loss_scale="last_round", sessions=3)
    assert caplog.text.count("`loss_scale: last_round` is ignored where Extend returns a `response_loss_mask`") == 1
    assert sum(trajectories[0].turns[0].mask) == trajectories[0].turns[0].num_tokens - 1


# Loops of their own


def check_no_thread(before=()):
    left = set(threading.enumerate()) - set(before)
    for thread in left if before else [each for each in left if each.name == "scheduler loop"]:
        thread.join(60)
        assert not thread.is_alive()


def test_records_make_up_one_trajectory():
    trajectories, runner, contexts = hold(Own, talk, {"kind": "a record each"}, sessions=12)
    trajectory = trajectories[3]
    assert contexts[:36].count(said("Q2")) == 12 and trajectory.stop_reason is StopReason.ENV_DONE
    assert [infos["number"] for _, infos in trajectory.environment.records] == [0, 1, 2]
    check_whole(trajectory, runner)
    check_no_thread()


def test_a_response_that_no_record_has_is_not_trained():
    trajectory, _, _ = hold(Own, talk, {"kind": "the second"})
    assert [turn.mask and sum(turn.mask) for turn in trajectory.turns] == [0, 3, 0]


class Broken(Ask):
    async def on_trajectory_start(self, requests):
        if requests[0].data_dict["kind"] == "start":
            raise ZeroDivisionError("in start")

    async def on_turn_end(self, infer_request, response_choice, current_turn):
        if infer_request.data_dict["kind"] == "turn end":
            await asyncio.Event().wait()

    def check_finished(self, infer_request, *rest):
        time.sleep(infer_request.data_dict["kind"] == "check")
        return super().check_finished(infer_request, *rest)

    def step(self, infer_request, *rest):
        if infer_request.data_dict["kind"] == "step":
            raise SystemExit(4)
        return super().step(infer_request, *rest)


class Unmade(Ask):
    def __init__(self, **kwargs):
        raise FileNotFoundError("corpus.jsonl")


@pytest.mark.parametrize(
    ("scheduler", "kind", "problem"),
    [
        *((Own, kind, "run took longer than 0.2 s between two responses") for kind in ("hangs", "blocks")),
        (Own, "raises", "ZeroDivisionError: in run"),
        (Own, "exits", "SystemExit: 3"),
        (Own, "nothing", "run returned NoneType: return a `RolloutOutput`"),
        (Own, "hot", "`RequestConfig.temperature` is 0.1"),
        (Own, "lengths", "Record 1, turn 1: `response_loss_mask` has 5 entries and `response_token_ids` has 3"),
        (Own, "turns", "Record 1: `response_loss_mask` is of 2 turns and `response_token_ids` of 1"),
        (Own, "renames", "has the id '000-0/1-0', which `infer_async` gave to none: leave the id as it is"),
        (Own, "renames", "are sampled with `branch_at`"),
        (Broken, "start", "in start"),
        (Broken, "turn end", "Broken.on_turn_end took longer than 0.2 s"),
        (Broken, "check", "Broken.check_finished took longer than 0.2 s"),
        (Broken, "step", "SystemExit: 4"),
        (Unmade, "", "FileNotFoundError: corpus.jsonl"),
    ],
)
def test_a_scheduler_that_goes_wrong_ends_its_conversation(scheduler, kind, problem):
    trajectory, _, _ = hold(scheduler, talk, {"kind": kind}, timeout=0.2 if "0.2 s" in problem else None)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and problem in trajectory.error


def test_an_engine_that_fails_ends_the_conversation_as_anywhere():
    for scheduler in (Ask, Own):
        trajectory, _, _ = hold(scheduler, lambda *turn: EngineError("The server is gone."), {"kind": "two each"})
        assert (trajectory.stop_reason, trajectory.error) == (StopReason.ENGINE_ERROR, "The server is gone.")


def test_a_conversation_that_is_out_of_time_leaves_no_thread():
    before = set(threading.enumerate())
    trajectory, _, _ = hold(Own, talk, {"kind": "hangs"}, timeout=None, rollout_timeout=0.2)
    assert trajectory.stop_reason is StopReason.TIMEOUT
    check_no_thread(before)


# What schedulers see


def test_a_scheduler_has_copies_of_everything():
    seen = []

    class Greedy(Ask):
        def __init__(self, max_turns=None, *args, **kwargs):
            super().__init__(max_turns, *args, **kwargs)  # as in files that know no engine

        def check_finished(self, infer_request, response_choice, current_turn):
            content = response_choice.logprobs["content"]
            seen.append(([entry["logprob"] for entry in content], list(response_choice.token_ids)))
            response_choice.token_ids.clear()
            content.clear()
            infer_request.data_dict["answers"].append("mine")
            return super().check_finished(infer_request, response_choice, current_turn)

    row = {"answers": ["theirs"]}
    trajectory, _, _ = hold(Greedy, talk, row)
    assert row == {"answers": ["theirs"]} and trajectory.row == row
    assert [ids for _, ids in seen] == trajectory.tree.actions() and len(seen) == 3
    assert [len(logprobs) for logprobs, _ in seen] == [turn.num_tokens for turn in trajectory.turns]


@pytest.mark.parametrize("form", [list, json.dumps])
def test_tools_of_a_row_are_shown_and_calls_left_alone(form):
    tools = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}]
    called = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    trajectory, _, contexts = hold(Ask, [called] * 2, {"tools": form(tools)}, max_turns=2)
    assert trajectory.error is None and "Looks." in contexts[0] and contexts[1].startswith(contexts[0] + called)
    assert trajectory.turns[0].text == called and trajectory.tree.num_sequences == 1


def test_the_answer_a_row_ends_with_is_not_shown():
    prompt = [*user("Q1"), {"role": "assistant", "content": "the solution"}]
    assert hold(Ask, talk, prompt=prompt, max_turns=1)[2] == [said("Q1")]


def test_hooks_end_a_conversation_and_tell_of_its_turns():
    class Told(Ask):
        async def on_trajectory_start(self, requests):
            requests[0].messages.insert(0, {"role": "system", "content": "Be brief."})

        async def on_turn_end(self, infer_request, response_choice, current_turn):
            infos = {"done": current_turn == 2, "rollout_infos": {f"turn_{current_turn}": True}, "reward": 0.5}
            return {**infos, **({"answer": "4"} if current_turn == 2 else {})}

        def step(self, infer_request, response_choice, current_turn):
            call = ToolCall("look", {}, "found", executed=True)
            return {**super().step(infer_request, response_choice, current_turn), "tool_calls": [call]}

    trajectory, _, contexts = hold(Told, talk, max_turns=5)
    assert contexts[0].startswith("<|im_start|>system\nBe brief.")
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.ANSWERED, "4")
    assert trajectory.info == {"turn_1": True, "turn_2": True, "num_turns": 2}
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0.5]
    assert [turn.has_result for turn in trajectory.turns] == [True, False]


# Built in


@pytest.mark.parametrize(("right", "turns"), [("2", 2), ("9", 3)])
def test_a_wrong_answer_is_asked_for_again(right, turns):
    script = [f"It is \\boxed{{{number}}}" for number in (1, 2, 3)]
    trajectory, _, contexts = hold(multi_turns["retry_scheduler"], script, {"solution": right})
    assert len(trajectory.turns) == turns and "Find the mistake" in contexts[1]


def test_thinking_tips_show_no_thought_twice():
    script = [f"<think>\nhm{turn}\n</think>\n\n<answer>{turn}</answer>" for turn in range(3)]
    trajectory, runner, contexts = hold(multi_turns["thinking_tips_scheduler"], script, {"solution": "2"})
    assert "hm0" not in contexts[1] and "<answer>0</answer>" in contexts[1] and len(trajectory.turns) == 3
    assert [infos for _, infos in trajectory.environment.records] == [{"num_turns": number} for number in (1, 2, 3)]
    check_whole(trajectory, runner)


@pytest.mark.parametrize("given", ["6*7", '{"expression": "6*7"}'])
def test_tool_results_stand_in_the_message_and_are_masked(given):
    turns = [f"Action: calculator\nAction Input: {given}\nObservation:", f" so 42{END}"]
    trajectory, runner, contexts = hold(multi_turns["tool_call_scheduler"], lambda session, turn: turns[turn])
    assert contexts[1].endswith("Observation: 42\n") and trajectory.info["tool_results"] == "42"
    assert [turn.has_result for turn in trajectory.turns] == [True, False]
    assert trajectory.stop_reason is StopReason.ENV_DONE
    check_whole(trajectory, runner)


class Count(Env):
    closed: list[str] = []

    async def reset(self, config):
        self.number = self.env_config["number"]
        if self.number < 0:
            raise ValueError("no such game")
        return "Count.", {}, "You count."

    def step(self, action):  # a plain method does as well
        over = action[-1]["content"] == f"A{self.number}"
        return "Go on.", 0.5, over, {"trajectory": len(action)}

    async def close(self):
        Count.closed.append(self.env_config["name"])


def test_gym_environments_reward_turns_and_are_closed(monkeypatch):
    monkeypatch.setitem(envs, "count", Count)
    Count.closed = []
    row = {"env_config": {"name": "count", "number": 2}}
    trajectory, runner, contexts = hold(multi_turns["gym_scheduler"], talk, row, max_turns=5)
    assert contexts[0].startswith(f"<|im_start|>system\nYou count.{END}\n") and "Go on." in contexts[1]
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0.5] and trajectory.env_rewards == {"total_reward": 1.0}
    assert trajectory.info["step_rewards"] == [0.5, 0.5] and trajectory.stop_reason is StopReason.ENV_DONE
    asyncio.run(trajectory.environment.close())
    assert Count.closed == ["count"]
    for config, problem in (({"name": "count", "number": -1}, "no such game"), ({"name": "chess"}, "names the env")):
        trajectory, _, _ = hold(multi_turns["gym_scheduler"], talk, {"env_config": config})
        assert problem in trajectory.error


def test_a_gym_environment_that_is_made_too_late_is_closed(monkeypatch):
    class Slow(Count):
        def __init__(self, config):
            time.sleep(0.3)
            super().__init__(config)

    monkeypatch.setitem(envs, "slow", Slow)
    Count.closed = []
    request = RolloutInferRequest(user("What?"), data_dict={"env_config": {"name": "slow", "number": 2}})

    async def given_up():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(multi_turns["gym_scheduler"](max_turns=1).on_trajectory_start([request]), 0.05)
        await until_true(lambda: Count.closed, limit=60.0)

    asyncio.run(given_up())


def test_a_message_that_plays_a_sound_keeps_it_beside_an_image():
    parts = [{"type": "image", "image": picture()}, {"type": "audio", "audio": [0.5]}, {"type": "text", "text": "?"}]
    messages = [{"role": "user", "content": parts}, *of_user(parts[::2])]
    written, images = without_images(messages)
    assert written == [messages[0], *user("<image>?")] and len(images) == 1


def adds_and_removes(request, turn):
    if turn == 1:
        request.images.append(picture("blue", (24, 16)))
        request.messages[-1]["content"] = "Now <image>?"
    else:
        del request.images[0]
        request.messages[0]["content"] = "What was it?"


def paints_over(request, turn):
    if turn == 2:
        request.images[0].paste(picture("blue", (24, 16)))


@pytest.mark.parametrize(
    ("edit", "colors"), [(adds_and_removes, ["red", "red blue", "blue"]), (paints_over, ["red", "red", "blue"])]
)
def test_a_turn_shows_the_images_that_a_scheduler_has_then(edit, colors):
    class Edits(Ask):
        def step(self, infer_request, response_choice, current_turn):
            given = super().step(infer_request, response_choice, current_turn)
            edit(infer_request, current_turn)
            return given

    processor, parts = (
        build_processor(),
        {color: {"type": "image", "image": picture(color, (24, 16))} for color in RGB},
    )
    encoder = MediaEncoder(processor)
    prompt = of_user([parts["red"], {"type": "text", "text": "What is it?"}])
    sees = {"tokenizer": processor.tokenizer, "engine": ScriptedSight, "media": encoder}
    [trajectory], runner = play(SchedulerSource(Edits, 3, timeout=5.0), talk, prompt=prompt, **sees)
    assert trajectory.stop_reason is StopReason.MAX_STEPS and trajectory.tree.num_sequences == 2, trajectory.error
    ids = {color: encoder.encode(part).id for color, part in parts.items()}
    shown = [[token for token in context if token < 0] for _, context, _ in runner.engine.requests]
    assert shown == [[ids[color] for color in each.split() for _ in range(6)] for each in colors]


@pytest.mark.parametrize(
    ("words", "number", "shown"),
    [
        (["a <image>"], 1, [["a ", 0]]),
        (["a"], 2, [[0, 1, "a"]]),
        (["a", "<image><image>"], 3, [[0, "a"], [1, 2]]),
        (["<image>"], 0, ["<image>"]),
    ],
)
def test_images_stand_at_their_places(words, number, shown):
    images = [picture(size=(8 * (each + 1), 8)) for each in range(number)]

    def of(content):
        parts = content if isinstance(content, list) else []
        return [part.get("text") or images.index(part["image"]) for part in parts] or content

    messages = [message for text in words for message in user(text)]
    assert [of(message["content"]) for message in _with_images(messages, images)] == shown


def test_what_the_model_writes_is_no_place_of_an_image():
    shown, words = {"type": "image", "image": picture()}, {"role": "assistant", "content": "I see an <image>."}
    sound = [{"type": "audio", "audio": [0.5]}, {"type": "text", "text": "An <image>?"}]
    asked = _with_images([*of_user(sound), words, *user("<image>")], [shown["image"]])
    assert asked == [*of_user(sound), words, *of_user([shown])]
    assert _with_images([*of_user(sound), words], [shown["image"]]) == [*of_user([shown, *sound]), words]
    seen = [{"role": "assistant", "content": [shown]}]
    assert without_images(seen) == (seen, [])


def test_other_images_than_places_are_refused():
    with pytest.raises(ValueError, match="have 2 times <image>, and the request has 1 images"):
        _with_images(user("<image> <image>"), [picture()])
