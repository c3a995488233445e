"""Training of models that see or hear: images and sounds in prompts and in results of tools, through the trainer."""

from contextlib import nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Audio, Dataset, Features, Image, List, Value
from support.audio import RATE, SOUND_FAMILIES, granite, tone
from support.images import VideoTextProcessor, build_processor, build_vision_model, picture
from support.models import CPU_RUN, build_model
from support.trainers import batch, check_log_probs, logged
from support.vision import VISION_FAMILIES
from support.waiting import until
from transformers import AutoModelForMultimodalLM, AutoProcessor, TrainerCallback

from mt_grpo import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.app.build import finish_dry_run
from mt_grpo.data.images import ImageOfRowError
from mt_grpo.envs import MultiTurnToolEnv, Outcome
from mt_grpo.errors import ConfigError, UnsupportedModelError, WeightSyncError
from mt_grpo.forward.model import score
from mt_grpo.media import media_of, media_parts, read_image, to_file
from mt_grpo.rollout.engines import ScriptedEngine
from mt_grpo.rollout.engines.vllm import VLLMServerClient
from mt_grpo.runlog.reader import open_run
from mt_grpo.sounds import Sound, _read_sound
from mt_grpo.training.columns import media_encoder, with_column_media

PROMPT = [{"role": "user", "content": "What is it?"}]
COLORS, PITCHES = ("red", "green", "blue", "white"), (30.0, 60.0, 90.0, 120.0)
IMAGES = [{"prompt": PROMPT, "images": [picture(color, (24, 16 + 8 * n))]} for n, color in enumerate(COLORS)]
SOUNDS = [{"prompt": PROMPT, "audio": {"array": tone(pitch), "sampling_rate": RATE}} for pitch in PITCHES]
TOOLS = MultiTurnToolEnv([], protocol="learnt_tags")


@cache
def hearing() -> Any:
    return SOUND_FAMILIES["qwen2-audio"]()[0]


def sight() -> tuple[Any, Any]:
    processor = build_processor()
    return processor, build_vision_model(processor.tokenizer)


# a model that sees or hears, and what it is shown after each turn
SEES = SimpleNamespace(
    type="image",
    processor=build_processor,
    build=sight,
    rows=Dataset.from_list(IMAGES),
    make=lambda number: picture("blue", (16, 16 + 8 * number)),
    tower="visual.patch_embed.proj",
    file="image_*.png",
    read=read_image,
    words="[image]",
    parts=["image", "text"],
)
HEARS = SimpleNamespace(
    type="audio",
    processor=hearing,
    build=SOUND_FAMILIES["qwen2-audio"],
    rows=SOUNDS,
    make=lambda number: {"type": "audio", "audio": tone(50.0, 0.5 + number), "sampling_rate": RATE},
    tower="audio_tower.conv1",
    file="sound_*.wav",
    read=_read_sound,
    words="[sound]",
    parts=["audio", "text"],
)
BOTH = SimpleNamespace(**vars(HEARS) | {"parts": ["audio", "image", "text"]})
BOTH.rows = [{**row, "images": [picture("red")]} for row in SOUNDS]
both = pytest.mark.parametrize("kind", [SEES, HEARS], ids=lambda kind: kind.type)
load = AutoModelForMultimodalLM.from_pretrained


def screen(kind: Any) -> type:
    class Screen:
        """Shows another medium after each turn, whatever the model writes, and at last forgets the first one."""

        async def run(self, policy: Any, row: dict[str, Any]) -> Outcome:
            messages = list(row["prompt"])
            for number in range(3):
                turn = await policy.reply(messages, max_tokens=6)
                parts = [{"type": "text", "text": "Now"}, kind.make(number)]
                messages += [turn.message, {"role": "user", "content": parts}]
                if number == 1:
                    del messages[1:3]
            return Outcome()

        async def close(self) -> None:
            pass

    return Screen


def words(completions: list[Any], **columns: Any) -> list[float]:
    return [float(sum(map(ord, str(messages[0]["content"]))) % 7) for messages in completions]


def trainer_of(kind: Any, folder: Path, model: Any, processor: Any, **options: Any) -> MTGRPOEnvTrainer:
    given = {"env": screen(kind), "train_dataset": kind.rows, "processing_class": processor}
    given |= {name: options.pop(name) for name in ("engine", "env", "train_dataset") if name in options}
    return MTGRPOEnvTrainer(model, args=MTGRPOConfig(str(folder), **CPU_RUN | options), reward_funcs=words, **given)


def small_trainer(kind: Any, folder: Path, **options: Any) -> MTGRPOEnvTrainer:
    """A trainer of the small model of a kind, whose weights are the same for all of a folder."""
    if not (folder / "model").exists():
        kind.build()[1].save_pretrained(folder / "model")
    limits = {"max_steps": 3, "learning_rate": 1e-3, "seed": 3, "max_turn_length": 6}
    return trainer_of(kind, folder / "run", load(folder / "model"), kind.processor(), **{**limits, **options})


def trained(kind: Any, folder: Path, resume: str | None = None, **options: Any) -> MTGRPOEnvTrainer:
    trainer = small_trainer(kind, folder, **options)
    trainer.train(resume)
    return trainer


def losses(trainer: MTGRPOEnvTrainer) -> torch.Tensor:
    return torch.tensor(logged(trainer, "loss", "grad_norm", *["kl"] * bool(trainer.beta)))


@pytest.mark.parametrize("content", ["What?", [{"type": "image"}, {"type": "text", "text": "What?"}]])
def test_a_dry_run_prints_a_prompt_with_its_images(tmp_path, capsys, content):
    row = {"prompt": [{"role": "user", "content": content}], "images": [picture("red", (24, 16))]}
    finish_dry_run(small_trainer(SEES, tmp_path, env=TOOLS, train_dataset=Dataset.from_list([row])), {})
    assert "<|im_start|>user\n<|vision_start|>[image]<|vision_end|>What?<|im_end|>" in capsys.readouterr().err


@both
@pytest.mark.parametrize("forward", ["tree", "padded"])
def test_a_teacher_is_shown_what_the_policy_was(tmp_path, kind, forward):
    kind.build()[1].save_pretrained(tmp_path / "model")
    kind.processor().save_pretrained(tmp_path / "model")
    options = {"teacher": {"model": str(tmp_path / "model")}, "distillation_coef": 1.0, "forward": forward}
    trainer = small_trainer(kind, tmp_path, **options)
    batch(trainer)
    ratios = [ratio for each in trainer.batch.trajectories for ratio in each.teacher_log_ratios]
    assert len(ratios) == 12 and max(map(abs, ratios)) <= 1e-5  # it is the policy, which has sampled them
    trainer.batch.taught = False
    for medium in {id(each): each for one in trainer.batch.trajectories for each in one.media.values()}.values():
        for values in medium.inputs.inputs.values():
            if values.is_floating_point():
                values.neg_()
    trainer.distillation.read(trainer.batch)
    assert max(abs(ratio) for each in trainer.batch.trajectories for ratio in each.teacher_log_ratios) > 1e-3


def test_a_teacher_reads_with_the_forward_that_was_proven(tmp_path, monkeypatch):
    used: list[str] = []

    def refuse(model: Any, plan: Any, precision: str) -> None:
        if plan.forward == "tree":
            raise UnsupportedModelError("The model sees no image in a tree, so trees cannot be packed for it.")

    def scored(model: Any, plan: Any) -> Any:
        used.append(plan.forward)
        return score(model, plan)

    monkeypatch.setattr("mt_grpo.training.forward_plan.prove_media", refuse)
    monkeypatch.setattr("mt_grpo.training.distillation.score", scored)
    SEES.build()[1].save_pretrained(tmp_path / "model")
    SEES.processor().save_pretrained(tmp_path / "model")
    trainer = small_trainer(SEES, tmp_path, teacher={"model": str(tmp_path / "model")}, distillation_coef=1.0)
    trainer.model.train()
    batch(trainer)
    assert set(used) == {"padded"}


@pytest.mark.parametrize("forward", ["tree", "padded"])
def test_a_teacher_of_text_is_shown_no_blank(tmp_path, forward):
    tokenizer = SEES.processor().tokenizer
    build_model(tokenizer, max_position_embeddings=1024).save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    options = {"teacher": {"model": str(tmp_path / "teacher")}, "distillation_coef": 1.0, "forward": forward}
    rows = Dataset.from_list([{"prompt": PROMPT}] * 4)
    trainer = small_trainer(SEES, tmp_path, env=TOOLS, train_dataset=rows, **options)
    encoder = media_encoder(trainer.processing_class, trainer.model.config, trainer.runner.engine)
    trainer.blank = encoder.blanks()  # as where several processes train
    batch(trainer)
    read = [each for each in trainer.batch.trajectories if each.turns]
    assert read and all(None not in each.teacher_log_ratios for each in read)


@both
def test_a_hint_stands_beside_what_is_shown(tmp_path, kind):
    rows = [{**row, "answer": "a b"} for row in kind.rows]
    rows = Dataset.from_list(rows) if kind is SEES else rows
    given = {"model": "self", "sees": ["answer"], "teacher_model_kind": "live"}
    trainer = small_trainer(kind, tmp_path, teacher=given, distillation_coef=1.0, train_dataset=rows)
    batch(trainer)
    ratios = [ratio for each in trainer.batch.trajectories for ratio in each.teacher_log_ratios]
    assert len(ratios) == 12 and None not in ratios and min(map(abs, ratios)) > 0
    for each in trainer.batch.trajectories:
        assert each.teacher_hint == "The right answer is\na b"


@both
@pytest.mark.slow
def test_three_steps_are_the_same_however_they_are_computed(tmp_path, kind):
    forwards = ("tree", "turn_by_turn", "padded")
    runs = {forward: trained(kind, tmp_path / forward, forward=forward, beta=0.1) for forward in forwards}
    assert {trainer.args.forward for trainer in runs.values()} == runs.keys()  # none gave up
    expected = losses(runs["turn_by_turn"])
    assert len(expected) == 3
    for forward in ("tree", "padded"):
        torch.testing.assert_close(losses(runs[forward]), expected, rtol=1e-4, atol=1e-6)
    tree, fresh = runs["tree"], load(tmp_path / "tree" / "model")
    moved, before = (model.get_submodule(f"model.{kind.tower}").weight for model in (tree.model, fresh))
    assert (moved - before).abs().max() > 1e-4
    assert {one.tree.num_sequences for one in tree.batch.trajectories} == {2}


@both
@pytest.mark.slow
def test_a_run_writes_each_medium_once_and_goes_on_with_them(tmp_path, kind):
    options = {"steps_per_generation": 2, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    whole, checkpoint = trained(kind, tmp_path, **options), tmp_path / "run" / "checkpoint-1"
    run = open_run(tmp_path / "run")
    record = run.trajectory(run.rows[0]["session"])
    messages = [*record["prompt"], *(reply for turn in record["turns"] for reply in turn["replies"])]
    parts = list(media_parts(messages))
    files, folder = [part[kind.type] for part in parts], tmp_path / "run" / "rollouts"
    assert len(files) == len(set(files)) == 2 and set(files) <= {path.name for path in folder.glob(kind.file)}
    [shown] = media_of(media_parts(whole.batch.trajectories[0].prompt))
    assert to_file(kind.read(folder / files[0])) == to_file(shown)
    assert kind.words in record["tokens"]["texts"]
    if kind is HEARS:
        assert [part["seconds"] for part in parts] == [1.0, 0.5]
        assert AutoProcessor.from_pretrained(checkpoint).feature_extractor.sampling_rate == RATE
    resumed = trained(kind, tmp_path, str(checkpoint), **options)
    torch.testing.assert_close(losses(resumed)[-1], losses(whole)[-1], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_conversations_with_media_are_sampled_ahead(tmp_path):
    """They are those of a run that waits; a resumed run goes on with those that a checkpoint has."""
    found, options = [], {"learning_rate": 0.0, "save_strategy": "steps", "save_steps": 1}
    for staleness, resumed in ((0, False), (2, False), (2, True)):
        trainer, finished = small_trainer(SEES, tmp_path, **options, max_staleness=staleness), TrainerCallback()
        finished.on_optimizer_step = lambda *given, runner=trainer.runner, **more: until(lambda: not runner.under_way)
        trainer.add_callback(finished)
        trainer.train(str(tmp_path / "run" / "checkpoint-1") if resumed else None)
        records = [each for each in open_run(tmp_path / "run").trajectories() if each["session"].startswith("train")]
        found.append({each["session"]: [node["tokens"] for node in each["tree"]["nodes"]] for each in records})
        assert trainer.state.global_step == 3 and len(found[-1]) == 12
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("off", [0.0, 2e-3])
def test_servers_that_show_another_image_end_the_run(tmp_path, off):
    trainer = small_trainer(SEES, tmp_path, max_staleness=1, max_steps=2)
    copy, engine = trainer.weight_sync, trainer.runner.engine
    trainer.weight_sync = SimpleNamespace(sync=copy.sync, check=copy.check, proof=SimpleNamespace(tolerance=1e-3))
    generate, trainer._unproven = engine.generate_with_media, None

    async def otherwise(*given: Any) -> Any:
        sample = await generate(*given)
        sample.logprobs = [value + off for value in sample.logprobs]
        return sample

    engine.generate_with_media = otherwise
    with pytest.raises(WeightSyncError, match="are 2.00e-03 nats a token apart") if off else nullcontext():
        trainer.train()


@pytest.mark.slow
def test_a_run_trains_on_videos_and_writes_their_frames(tmp_path):
    processor = build_processor(kind=VideoTextProcessor)
    video = {"type": "video", "video": [picture("red"), picture("blue")], "fps": 1}
    rows = [{"prompt": [{"role": "user", "content": [video, {"type": "text", "text": "What?"}]}]}] * 4
    model = build_vision_model(processor.tokenizer)
    trainer = trainer_of(SEES, tmp_path, model, processor, train_dataset=rows, max_steps=1, learning_rate=1e-3)
    trainer.train()
    assert trainer.args.forward == "tree" and losses(trainer)[0][1] > 0
    run = open_run(tmp_path)
    files = run.trajectory(run.rows[0]["session"])["prompt"][0]["content"][0]["video"]
    assert len(set(files)) == 2 and all((tmp_path / "rollouts" / file).exists() for file in files)


LEARN = {"qwen2.5-vl": (SEES, sight, "tree")}
LEARN |= {name: (SEES, *VISION_FAMILIES[name]) for name in ("idefics 3", "mistral 3", "gemma 3")}
LEARN |= {f"{name} hears": (HEARS, SOUND_FAMILIES[name], "tree") for name in ("qwen2-audio", "gemma 4", "voxtral")}
LEARN["qwen2.5-omni"] = (BOTH, SOUND_FAMILIES["qwen2.5-omni"], "tree")


@pytest.mark.parametrize(("kind", "make", "packed"), LEARN.values(), ids=list(LEARN))
def test_training_scores_what_a_family_sampled(tmp_path, kind, make, packed, caplog):
    processor, model = make()
    trainer = trainer_of(kind, tmp_path, model, processor)
    trainer.model.train()
    inputs = batch(trainer)
    check_log_probs(trainer, inputs)
    assert trainer.args.forward == ("tree" if packed == "tree" else "padded")
    assert packed == "tree" or packed in caplog.text
    assert (inputs["prompt_ids"] < 0).any() and (inputs["completion_ids"] < 0).any()
    shown = [part["type"] for part in trainer.batch.trajectories[0].prompt[0]["content"]]
    assert sorted(shown) == kind.parts


def test_a_model_that_hears_padding_trains_turn_by_turn(tmp_path):
    processor, model = granite()
    trainer = trainer_of(HEARS, tmp_path, model, processor)
    trainer.model.train()
    with pytest.raises(UnsupportedModelError, match="cannot be trained with sounds in batches: .* set `forward: turn"):
        batch(trainer)


def test_a_model_whose_trees_of_images_differ_trains_in_rows(tmp_path, monkeypatch, caplog):
    # positions as in a text, which a tree without images cannot tell from the model's
    monkeypatch.setattr("mt_grpo.forward.media.RowMedia.positions", lambda *given: None)
    trainer = small_trainer(SEES, tmp_path, use_vllm=False)
    trainer.model.train()
    check_log_probs(trainer, batch(trainer))
    assert trainer.args.forward == "padded" and "scores packed trees with images" in caplog.text


def test_a_model_alone_plays_files_with_its_own_processor(tmp_path):
    """As `datasets.Audio` gives them where nothing decodes them: their bytes, and their path."""
    for each in HEARS.build():
        each.save_pretrained(tmp_path / "model")
    (tmp_path / "tone.wav").write_bytes(to_file(Sound(tone(), RATE)))
    rows = Dataset.from_dict({"prompt": ["What is it?"] * 4, "audio": [str(tmp_path / "tone.wav")] * 4})
    rows = rows.cast_column("audio", Audio(decode=False))
    trainer = trainer_of(HEARS, tmp_path / "run", str(tmp_path / "model"), None, train_dataset=rows)
    batch(trainer)
    assert [each.error for each in trainer.batch.trajectories] == [None] * 4
    assert trainer.batch.trajectories[0].prompt[0]["content"][0]["audio"] == Sound(tone(), RATE)


# Rows


LOW, HIGH = ({"array": tone(pitch), "sampling_rate": RATE} for pitch in (30.0, 90.0))
RED, BLUE = picture("red"), picture("blue")


@pytest.mark.parametrize(
    ("kind", "column", "media", "expected"),
    [
        ("image", "images", [RED, BLUE], [RED, BLUE]),
        ("audio", "audios", [LOW, HIGH], [Sound(each["array"], RATE) for each in (LOW, HIGH)]),
        ("audio", "audios", [tone().tolist()] * 2, [Sound(tone())] * 2),  # as a table has it
    ],
)
def test_media_stand_where_their_places_are(kind, column, media, expected):
    """Or, as in TRL, before the text."""
    before = with_column_media({"prompt": "What is it?", kind: media[0]})["prompt"]
    (medium, text) = before[0]["content"]
    assert (medium["type"], medium[kind], text) == (kind, expected[0], {"type": "text", "text": "What is it?"})
    places = [{"type": "text", "text": "this", kind: None}, {"type": kind, "text": None}, {"type": kind}]
    filled = with_column_media({"prompt": [{"role": "user", "content": places}], column: media})["prompt"]
    assert [part.get(kind) for part in filled[0]["content"]] == [None, *expected]
    assert with_column_media({"prompt": "What?", column: None}) == {"prompt": "What?", column: None}


PLACE, VIDEO = {"type": "audio"}, {"type": "video", "video": "a"}
ADDRESS = {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}


@pytest.mark.parametrize(
    ("prompt", "column", "media", "problem"),
    [
        ([{"type": "image"}] * 2, "images", [picture()], r"images provided \(1\) does not match"),
        ([VIDEO], "images", [], "Give a video as a list of images; got 'a'"),
        ([ADDRESS], "images", [], "shows a part of type 'video_url', and rollouts hold text, images"),
        ("What?", "audios", [b"no sound"], "A sound of 8 bytes cannot be read as a sound: it is broken"),
        ("What?", "audios", ["/no/such.wav"], "The sound '/no/such.wav' cannot be read: No such file or"),
        ([PLACE] * 2, "audios", [tone()], "the prompt has 2 places for sounds, and the row has 1 sounds"),
        ([PLACE | {"path": "/no.wav"}], "audios", [tone()], "The sound '/no.wav' cannot be read: No such"),
    ],
)
def test_a_row_with_a_bad_medium_is_one_sentence(prompt, column, media, problem):
    said = {"images": "The images of a row cannot be shown", "audios": "The sounds of a row cannot be played"}[column]
    with pytest.raises(ConfigError, match=f"{said}: .*{problem}"):
        with_column_media({"prompt": [{"role": "user", "content": prompt}], column: media})


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (None, "a prompt that is neither text nor a list of messages: 'None'"),
        ([{"content": "What?"}], "a prompt that is neither text nor a list of messages"),
        ([{"role": "user"}], "a message without `content`"),
    ],
)
def test_a_row_without_a_prompt_is_one_sentence(prompt, problem):
    """Rows of a stream, and all but the first of a table, are looked at when they are asked."""
    for row in ({}, {"audio": tone()}):
        with pytest.raises(ConfigError, match=f"A row of the dataset has {problem}"):
            with_column_media({"prompt": prompt, **row})


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
TEXT = Value("string")
PARTS = List({"role": TEXT, "content": List({"type": TEXT, "text": TEXT, "image": Image()})})
FEATURES = {"image": Image(), "images": List(Image()), "photo": Image(), "prompt": PARTS}


@pytest.mark.parametrize(
    ("column", "kind"),
    [*product(["image", "images", "photo", "prompt"], ["path", "file"]), ("image", "bytes"), ("images", "bytes")],
)
def test_a_row_with_a_bad_image_is_named(tmp_path, column, kind):
    def row(name, data):
        (tmp_path / name).write_bytes(data)
        images = {"path": {"path": str(tmp_path / name)}, "file": {"bytes": data, "path": name}, "bytes": data}
        image, what = images[kind], {"type": "text", "text": "What?"}
        if column == "prompt":
            return {"prompt": [{"role": "user", "content": [what, {"type": "image", "image": image}]}]}
        return {"prompt": PROMPT, column: [image] if column == "images" else image}

    features = {"prompt": List({"role": TEXT, "content": TEXT}), column: FEATURES[column]}
    rows = [row("good", to_file(picture()))] * 5 + [row("bad", EPS)]
    rows = Dataset.from_list(rows, features=None if kind == "bytes" else Features(features))
    trainer = small_trainer(SEES, tmp_path, env=TOOLS, train_dataset=rows, max_steps=6)
    said = "Row 5 .counted from 0. of the training dataset has an image that cannot be shown"
    for act in (lambda: trainer.rollout(6), trainer.train):
        with pytest.raises(ImageOfRowError, match=f"{said}, in the column '{column}': .* of no known kind"):
            act()
    with pytest.raises(ImageOfRowError, match="Row 0 .counted from 0. of the evaluation dataset"):
        trainer.evaluate(rows.select([5]))


# What cannot be shown


def files(decode: bool = False) -> Dataset:
    rows = Dataset.from_list([{"prompt": "What is it?", "audio": "a.wav"}])
    return rows.cast_column("audio", Audio(decode=decode))


def of_text() -> tuple[Any, Any]:
    tokenizer = build_processor().tokenizer
    return tokenizer, build_model(tokenizer)


def without_processor() -> tuple[Any, Any]:
    return hearing().tokenizer, HEARS.build()[1]


def scripted(tokenizer: Any) -> ScriptedEngine:
    return ScriptedEngine(tokenizer, ["a"])


def server(tokenizer: Any) -> VLLMServerClient:
    return VLLMServerClient("http://127.0.0.1:9", tokenizer)


HOLDS, DECODE = "'audio' .* holds sounds, and", "torchcodec, which is not installed: .*datasets.Audio"


@pytest.mark.parametrize(
    ("kind", "build", "options", "problem"),
    [
        (SEES, of_text, {}, "The column 'images' .* the model takes text only: use a model that takes"),
        (SEES, sight, {"engine": scripted}, "ScriptedEngine is given tokens of text only: sample with the model"),
        (HEARS, of_text, {}, f"{HOLDS} the model takes text o"),
        (HEARS, sight, {}, f"{HOLDS} the model takes no sounds: use a model that takes sounds"),
        (HEARS, without_processor, {}, f"{HOLDS} there is no processor of sounds: pass the model's"),
        (HEARS, HEARS.build, {"engine": scripted}, f"{HOLDS} ScriptedEngine is given tokens of text only: sample"),
        (HEARS, HEARS.build, {"engine": server}, "holds sounds, which are not sent to a vLLM server: set `use_vll"),
        (HEARS, HEARS.build, {"train_dataset": files(decode=True)}, f"'audio' .* {DECODE}.decode"),
    ],
)
def test_models_that_cannot_be_shown_media_are_refused(tmp_path, kind, build, options, problem):
    processor, model = build()
    given = ({"train_dataset": files()} if kind is HEARS else {}) | options
    if "engine" in given:
        given["engine"] = given["engine"](processor.tokenizer)
    with pytest.raises(ConfigError, match=problem):
        trainer_of(kind, tmp_path, model, processor, **given)
