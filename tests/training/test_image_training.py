"""Training of a vision-language model: images in prompts and in results of tools, through the trainer."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Image, List, Value
from support.images import VideoTextProcessor, build_processor, build_vision_model, picture
from support.models import CPU_RUN, build_model
from support.trainers import batch, check_log_probs
from support.vision import VISION_FAMILIES
from support.waiting import until
from transformers import AutoModelForImageTextToText, TrainerCallback

from mt_grpo import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.app.build import finish_dry_run
from mt_grpo.data.images import ImageOfRowError
from mt_grpo.envs import MultiTurnToolEnv, Outcome
from mt_grpo.errors import ConfigError
from mt_grpo.media import media_parts, read_image, to_file
from mt_grpo.rollout.engine import ScriptedEngine
from mt_grpo.runlog.reader import open_run
from mt_grpo.training.media import with_column_media

COLORS = ("red", "green", "blue", "white")
ROWS = Dataset.from_list(
    [
        {"prompt": [{"role": "user", "content": "What is it?"}], "images": [picture(color, (24, 16 + 8 * number))]}
        for number, color in enumerate(COLORS)
    ]
)


class Screen:
    """Shows another image after each turn, whatever the model writes, and at last forgets the first one."""

    async def run(self, policy: Any, row: dict[str, Any]) -> Outcome:
        messages = list(row["prompt"])
        for number in range(3):
            turn = await policy.reply(messages, max_tokens=6)
            parts = [{"type": "text", "text": "Now"}, picture("blue", (16, 16 + 8 * number))]
            messages += [turn.message, {"role": "user", "content": parts}]
            if number == 1:
                del messages[1:3]
        return Outcome()

    async def close(self) -> None:
        pass


def words(completions: list[Any], **columns: Any) -> list[float]:
    return [float(sum(map(ord, str(messages[0]["content"]))) % 7) for messages in completions]


def trainer_of(folder: Path, env: Any = Screen, rows: Any = ROWS, **options: Any) -> MTGRPOEnvTrainer:
    processor = build_processor()
    if not (folder / "model").exists():
        build_vision_model(processor.tokenizer).save_pretrained(folder / "model")
    limits = {"max_steps": 3, "learning_rate": 1e-3, "seed": 3, "max_turn_length": 6}
    return MTGRPOEnvTrainer(
        AutoModelForImageTextToText.from_pretrained(folder / "model"),
        env,
        args=MTGRPOConfig(str(folder / "run"), **{**CPU_RUN, **limits, **options}),
        reward_funcs=words,
        train_dataset=rows,
        processing_class=processor,
    )


def trained(folder: Path, resume: str | None = None, **options: Any) -> MTGRPOEnvTrainer:
    trainer = trainer_of(folder, **options)
    trainer.train(resume)
    return trainer


def losses(trainer: MTGRPOEnvTrainer) -> list[tuple[float, ...]]:
    keys = ("loss", "grad_norm", "kl")
    return [tuple(line.get(key, 0.0) for key in keys) for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("content", ["What?", [{"type": "image"}, {"type": "text", "text": "What?"}]])
def test_a_dry_run_prints_a_prompt_with_its_images(tmp_path, capsys, content):
    row = {"prompt": [{"role": "user", "content": content}], "images": [picture("red", (24, 16))]}
    rows = Dataset.from_list([row])
    finish_dry_run(trainer_of(tmp_path, MultiTurnToolEnv([], protocol="learnt_tags"), rows), {})
    assert "<|im_start|>user\n<|vision_start|>[image]<|vision_end|>What?<|im_end|>" in capsys.readouterr().err


@pytest.mark.slow
def test_three_steps_are_the_same_however_they_are_computed(tmp_path):
    runs = {
        forward: trained(tmp_path / forward, forward=forward, beta=0.1)
        for forward in ("tree", "turn_by_turn", "padded")
    }
    assert {trainer.args.forward for trainer in runs.values()} == runs.keys()  # none gave up
    expected = losses(runs["turn_by_turn"])
    assert len(expected) == 3
    for forward in ("tree", "padded"):
        for found, values in zip(losses(runs[forward]), expected, strict=True):
            assert found == pytest.approx(values, rel=1e-4, abs=1e-6)
    tree, fresh = runs["tree"], build_vision_model(build_processor().tokenizer)
    moved = tree.model.model.visual.patch_embed.proj.weight - fresh.model.visual.patch_embed.proj.weight
    assert moved.abs().max() > 1e-4
    assert {one.tree.num_sequences for one in tree.batch.trajectories} == {2}


@pytest.mark.slow
def test_a_resumed_run_trains_on_the_images_that_were_left(tmp_path):
    options = {"steps_per_generation": 2, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    whole = trained(tmp_path, **options)
    resumed = trained(tmp_path, str(tmp_path / "run" / "checkpoint-1"), **options)
    assert losses(resumed)[-1] == pytest.approx(losses(whole)[-1], rel=1e-5)


class Finished(TrainerCallback):
    """Steps end when the batches ahead are finished, so that a checkpoint has them."""

    trainer: MTGRPOEnvTrainer

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        until(lambda: not self.trainer.runner.under_way)


@pytest.mark.slow
@pytest.mark.parametrize("env", [Screen, MultiTurnToolEnv([], protocol="learnt_tags")], ids=["own", "tools"])
def test_conversations_with_images_are_sampled_ahead(tmp_path, env):
    """They are those of a run that waits, and a resumed run goes on with those that are finished."""
    options = {"env": env, "learning_rate": 0.0, "save_strategy": "steps", "save_steps": 1}
    found = []
    for staleness, resumed in ((0, False), (2, False), (2, True)):
        trainer = trainer_of(tmp_path, **options, max_staleness=staleness)
        finished = Finished()
        finished.trainer = trainer
        trainer.add_callback(finished)
        trainer.train(str(tmp_path / "run" / "checkpoint-1") if resumed else None)
        records = [each for each in open_run(tmp_path / "run").trajectories() if each["session"].startswith("train")]
        found.append({each["session"]: [node["tokens"] for node in each["tree"]["nodes"]] for each in records})
        assert trainer.state.global_step == 3 and len(found[-1]) == 12
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_a_run_writes_each_image_once(tmp_path):
    trainer = trained(tmp_path, max_steps=1)
    run = open_run(tmp_path / "run")
    record = run.trajectory(run.rows[0]["session"])
    messages = [*record["prompt"], *(reply for turn in record["turns"] for reply in turn["replies"])]
    files = [part["image"] for part in media_parts(messages)]
    assert len(files) == len(set(files)) == 2
    shown = {path.name for path in (tmp_path / "run" / "rollouts").glob("image_*.png")}
    assert set(files) <= shown
    drawn = read_image(tmp_path / "run" / "rollouts" / files[0])
    assert drawn.tobytes() == trainer.batch.trajectories[0].prompt[0]["content"][0]["image"].tobytes()
    assert "[image]" in record["tokens"]["texts"]


def test_tree_and_engine_agree_on_what_was_sampled(tmp_path):
    trainer = trainer_of(tmp_path)
    inputs = batch(trainer)
    assert (inputs["prompt_ids"] < 0).any() and (inputs["completion_ids"] < 0).any()
    check_log_probs(trainer, inputs)


@pytest.mark.slow
def test_a_run_trains_on_videos_and_writes_their_frames(tmp_path):
    processor = build_processor(kind=VideoTextProcessor)
    parts = [
        {"type": "video", "video": [picture("red"), picture("blue")], "fps": 1},
        {"type": "text", "text": "What?"},
    ]
    trainer = MTGRPOEnvTrainer(
        build_vision_model(processor.tokenizer),
        Screen,
        args=MTGRPOConfig(str(tmp_path), **CPU_RUN, max_steps=1, learning_rate=1e-3),
        reward_funcs=words,
        train_dataset=[{"prompt": [{"role": "user", "content": parts}]}] * 4,
        processing_class=processor,
    )
    trainer.train()
    assert trainer.args.forward == "tree" and losses(trainer)[0][1] > 0
    run = open_run(tmp_path)
    record = run.trajectory(run.rows[0]["session"])
    files = record["prompt"][0]["content"][0]["video"]
    assert len(set(files)) == 2 and all((tmp_path / "rollouts" / file).exists() for file in files)


# What cannot be shown


def test_images_for_a_model_of_text_are_refused(tmp_path):
    processor = build_processor()
    with pytest.raises(ConfigError, match="The column 'images' .* the model takes text only: use a model that takes"):
        MTGRPOEnvTrainer(
            build_model(processor.tokenizer),
            Screen,
            args=MTGRPOConfig(str(tmp_path), **CPU_RUN),
            reward_funcs=words,
            train_dataset=ROWS,
            processing_class=processor.tokenizer,
        )


def test_an_engine_of_tokens_refuses_images(tmp_path):
    processor = build_processor()
    with pytest.raises(ConfigError, match="ScriptedEngine is given tokens of text only: sample with the model itself"):
        MTGRPOEnvTrainer(
            build_vision_model(processor.tokenizer),
            Screen,
            args=MTGRPOConfig(str(tmp_path), **CPU_RUN),
            reward_funcs=words,
            train_dataset=ROWS,
            processing_class=processor,
            engine=ScriptedEngine(processor.tokenizer, ["a"]),
        )


@pytest.mark.parametrize(
    ("prompt", "images", "problem"),
    [
        ([{"type": "image"}] * 2, [picture()], r"Number of images provided \(1\) does not match"),
        (
            [{"type": "video", "video": "a.mp4"}],
            [],
            "A video is the list of its frames, .* 'a.mp4' is none: decode it",
        ),
        (
            [{"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}],
            [],
            "shows a part of type 'video_url', and rollouts hold text, images",
        ),
    ],
    ids=["places", "video", "address"],
)
def test_a_row_with_a_bad_image_is_one_sentence(prompt, images, problem):
    row = {"prompt": [{"role": "user", "content": prompt}], "images": images}
    with pytest.raises(ConfigError, match=f"The images of a row cannot be shown: .*{problem}"):
        with_column_media(row)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize(
    ("column", "kind"),
    [*product(["image", "images", "photo", "prompt"], ["path", "file"]), ("image", "bytes"), ("images", "bytes")],
)
def test_a_row_with_a_bad_image_is_named(tmp_path, column, kind):
    files = {"good": to_file(picture()), "bad": EPS}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)

    def row(name):
        image = {"bytes": files[name], "path": name} if kind == "file" else {"path": str(tmp_path / name)}
        image = files[name] if kind == "bytes" else image
        content = [{"type": "text", "text": "What?"}, {"type": "image", "image": image}]
        message = {"role": "user", "content": content if column == "prompt" else "What?"}
        return {"prompt": [message]} | (
            {} if column == "prompt" else {column: [image] if column == "images" else image}
        )

    text = Value("string")
    part = {"type": text, "text": text, "image": Image()}
    features = Features({"prompt": List({"role": text, "content": List(part) if column == "prompt" else text})})
    if column != "prompt":
        features[column] = List(Image()) if column == "images" else Image()
    rows = Dataset.from_list([*map(row, ["good"] * 5), row("bad")], features=None if kind == "bytes" else features)
    trainer = trainer_of(tmp_path, MultiTurnToolEnv([], protocol="learnt_tags"), rows, max_steps=6)
    says = (
        f"Row 5 .counted from 0. of the training dataset has an image that cannot be shown, in the column '{column}'"
    )
    with pytest.raises(ImageOfRowError, match=f"{says}: .* of no known kind"):
        trainer.rollout(6)
    with pytest.raises(ImageOfRowError, match=f"{says}: .* of no known kind"):
        trainer.train()
    with pytest.raises(ImageOfRowError, match="Row 0 .counted from 0. of the evaluation dataset"):
        trainer.evaluate(rows.select([5]))


def test_images_stand_where_trl_puts_them():
    image, other = picture("red"), picture("blue")
    before = with_column_media({"prompt": "What is it?", "image": image})["prompt"]
    assert before[0]["content"] == [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]
    places = [{"type": "text", "text": "this", "image": None}, {"type": "image", "text": None}, {"type": "image"}]
    filled = with_column_media({"prompt": [{"role": "user", "content": places}], "images": [image, other]})["prompt"]
    assert [part.get("image") for part in filled[0]["content"]] == [None, image, other]
    assert with_column_media({"prompt": "What?", "images": None}) == {"prompt": "What?", "images": None}


@pytest.mark.parametrize("name", ["idefics 3", "mistral 3", "gemma 3"])
def test_models_of_other_families_train(tmp_path, name, caplog):
    make, packed = VISION_FAMILIES[name]
    processor, model = make()
    trainer = MTGRPOEnvTrainer(
        model,
        Screen,
        args=MTGRPOConfig(str(tmp_path), **CPU_RUN),
        reward_funcs=words,
        train_dataset=ROWS,
        processing_class=processor,
    )
    trainer.model.train()
    inputs = batch(trainer)
    assert trainer.args.forward == ("tree" if packed == "tree" else "padded")
    assert packed == "tree" or packed in caplog.text
    check_log_probs(trainer, inputs)


def test_a_model_whose_trees_of_images_differ_trains_in_rows(tmp_path, monkeypatch, caplog):
    # positions as in a text, which a tree without images cannot tell from the model's
    monkeypatch.setattr("mt_grpo.forward.model.packed_positions", lambda *given: None)
    trainer = trainer_of(tmp_path, use_vllm=False)
    trainer.model.train()
    inputs = batch(trainer)
    assert trainer.args.forward == "padded"
    assert "scores packed trees with images" in caplog.text
    check_log_probs(trainer, inputs)
