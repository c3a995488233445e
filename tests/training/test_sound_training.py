"""Training of a model that hears: sounds in prompts and in results of tools, through the trainer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from datasets import Audio, Dataset
from support.audio import RATE, SOUND_FAMILIES, granite, tone
from support.images import build_processor, build_vision_model, picture
from support.models import CPU_RUN, build_model
from support.trainers import batch, check_log_probs
from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration

from mt_grpo import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.envs import Outcome
from mt_grpo.errors import ConfigError, UnsupportedModelError
from mt_grpo.media import media_parts, to_file
from mt_grpo.rollout.engine import ScriptedEngine
from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.runlog.reader import open_run
from mt_grpo.sounds import Sound, read_part, read_sound
from mt_grpo.training.media import check_media, media_encoder, with_column_media

ROWS = [
    {"prompt": [{"role": "user", "content": "What is it?"}], "audio": {"array": tone(pitch), "sampling_rate": RATE}}
    for pitch in (30.0, 60.0, 90.0, 120.0)
]


class Player:
    """Plays another sound after each turn, whatever the model writes, and at last forgets the first one."""

    async def run(self, policy: Any, row: dict[str, Any]) -> Outcome:
        messages = list(row["prompt"])
        for number in range(3):
            turn = await policy.reply(messages, max_tokens=6)
            parts = [
                {"type": "text", "text": "Now"},
                {"type": "audio", "audio": tone(50.0, 0.5 + number), "sampling_rate": RATE},
            ]
            messages += [turn.message, {"role": "user", "content": parts}]
            if number == 1:
                del messages[1:3]
        return Outcome()

    async def close(self) -> None:
        pass


def words(completions: list[Any], **columns: Any) -> list[float]:
    return [float(sum(map(ord, str(messages[0]["content"]))) % 7) for messages in completions]


@cache
def hearing() -> Any:
    return SOUND_FAMILIES["qwen2-audio"]()[0]


def trainer_of(folder: Path, env: Any = Player, rows: Any = ROWS, **options: Any) -> MTGRPOEnvTrainer:
    if not (folder / "model").exists():
        SOUND_FAMILIES["qwen2-audio"]()[1].save_pretrained(folder / "model")
    limits = {"max_steps": 3, "learning_rate": 1e-3, "seed": 3, "max_turn_length": 6}
    return MTGRPOEnvTrainer(
        Qwen2AudioForConditionalGeneration.from_pretrained(folder / "model"),
        env,
        args=MTGRPOConfig(str(folder / "run"), **{**CPU_RUN, **limits, **options}),
        reward_funcs=words,
        train_dataset=rows,
        processing_class=hearing(),
    )


def trained(folder: Path, resume: str | None = None, **options: Any) -> MTGRPOEnvTrainer:
    trainer = trainer_of(folder, **options)
    trainer.train(resume)
    return trainer


def losses(trainer: MTGRPOEnvTrainer) -> list[tuple[float, ...]]:
    keys = ("loss", "grad_norm", "kl")
    return [tuple(line.get(key, 0.0) for key in keys) for line in trainer.state.log_history if "loss" in line]


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
    tree = runs["tree"]
    fresh = Qwen2AudioForConditionalGeneration.from_pretrained(tmp_path / "tree" / "model")
    moved = tree.model.model.audio_tower.conv1.weight - fresh.model.audio_tower.conv1.weight
    assert moved.abs().max() > 1e-4
    assert {one.tree.num_sequences for one in tree.batch.trajectories} == {2}


@pytest.mark.slow
def test_a_resumed_run_trains_on_the_sounds_that_were_left(tmp_path):
    options = {"steps_per_generation": 2, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    whole = trained(tmp_path, **options)
    resumed = trained(tmp_path, str(tmp_path / "run" / "checkpoint-1"), **options)
    assert losses(resumed)[-1] == pytest.approx(losses(whole)[-1], rel=1e-5)


@pytest.mark.slow
def test_conversations_with_sounds_are_sampled_ahead(tmp_path):
    """They are those of a run that waits."""
    found = []
    for staleness in (0, 2):
        trainer = trainer_of(tmp_path, learning_rate=0.0, max_staleness=staleness)
        trainer.train()
        records = [each for each in open_run(tmp_path / "run").trajectories() if each["session"].startswith("train")]
        found.append({each["session"]: [node["tokens"] for node in each["tree"]["nodes"]] for each in records})
        assert trainer.state.global_step == 3 and len(found[-1]) == 12
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_run_writes_each_sound_once_and_its_processor(tmp_path):
    trainer = trained(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    run = open_run(tmp_path / "run")
    record = run.trajectory(run.rows[0]["session"])
    messages = [*record["prompt"], *(reply for turn in record["turns"] for reply in turn["replies"])]
    parts = list(media_parts(messages))
    files = [part["audio"] for part in parts]
    assert len(files) == len(set(files)) == 2 and [part["seconds"] for part in parts] == [1.0, 0.5]
    kept = {path.name for path in (tmp_path / "run" / "rollouts").glob("sound_*.wav")}
    assert set(files) <= kept
    heard = trainer.batch.trajectories[0].prompt[0]["content"][0]["audio"]
    assert read_sound(tmp_path / "run" / "rollouts" / files[0]) == heard
    assert "[sound]" in record["tokens"]["texts"]
    again = AutoProcessor.from_pretrained(tmp_path / "run" / "checkpoint-1")
    assert again.feature_extractor.sampling_rate == RATE


def test_tree_and_engine_agree_on_what_was_sampled(tmp_path):
    trainer = trainer_of(tmp_path)
    inputs = batch(trainer)
    assert (inputs["prompt_ids"] < 0).any() and (inputs["completion_ids"] < 0).any()
    check_log_probs(trainer, inputs)


@pytest.mark.parametrize("name", ["qwen2.5-omni", "gemma 4", "voxtral"])
def test_models_of_other_families_train(tmp_path, name):
    processor, model = SOUND_FAMILIES[name]()
    trainer = MTGRPOEnvTrainer(
        model,
        Player,
        args=MTGRPOConfig(str(tmp_path), **CPU_RUN),
        reward_funcs=words,
        train_dataset=ROWS,
        processing_class=processor,
    )
    trainer.model.train()
    inputs = batch(trainer)
    assert trainer.args.forward == "tree"
    check_log_probs(trainer, inputs)


def test_images_and_sounds_stand_in_one_conversation(tmp_path):
    processor, model = SOUND_FAMILIES["qwen2.5-omni"]()
    rows = [{**row, "images": [picture("red")]} for row in ROWS]
    trainer = MTGRPOEnvTrainer(
        model,
        Player,
        args=MTGRPOConfig(str(tmp_path), **CPU_RUN),
        reward_funcs=words,
        train_dataset=rows,
        processing_class=processor,
    )
    trainer.model.train()
    inputs = batch(trainer)
    assert trainer.args.forward == "tree"
    kinds = [part["type"] for part in trainer.batch.trajectories[0].prompt[0]["content"]]
    assert sorted(kinds) == ["audio", "image", "text"]
    check_log_probs(trainer, inputs)


def test_a_model_that_hears_padding_trains_turn_by_turn(tmp_path):
    processor, model = granite()
    options = {"reward_funcs": words, "train_dataset": ROWS, "processing_class": processor}
    trainer = MTGRPOEnvTrainer(model, Player, args=MTGRPOConfig(str(tmp_path / "tree"), **CPU_RUN), **options)
    trainer.model.train()
    with pytest.raises(UnsupportedModelError, match="cannot be trained with sounds in batches: .* set `forward: turn"):
        batch(trainer)


# Rows


def test_sounds_stand_where_their_places_are():
    low, high = ({"array": tone(pitch), "sampling_rate": RATE} for pitch in (30.0, 90.0))
    before = with_column_media({"prompt": "What is it?", "audio": low})["prompt"]
    part = read_part({"type": "audio", "audio": low})
    assert before == [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]
    places = [{"type": "text", "text": "this", "audio": None}, {"type": "audio", "text": None}, {"type": "audio"}]
    filled = with_column_media({"prompt": [{"role": "user", "content": places}], "audios": [low, high]})["prompt"]
    assert [part.get("audio") for part in filled[0]["content"]] == [
        None,
        *(Sound(each["array"], RATE) for each in (low, high)),
    ]
    assert with_column_media({"prompt": "What?", "audio": None}) == {"prompt": "What?", "audio": None}
    listed = with_column_media({"prompt": "What?", "audio": tone().tolist()})["prompt"][0]["content"]
    assert listed[0]["audio"] == Sound(tone())  # as a table has an array


@pytest.mark.parametrize(
    ("prompt", "sounds", "problem"),
    [
        ("What?", [b"no sound"], "A sound of 8 bytes cannot be read as a sound: it is broken, or of no known kind"),
        ("What?", ["/no/such.wav"], "The sound '/no/such.wav' cannot be read: No such file or directory"),
        ([{"type": "audio"}] * 2, [tone()], "the prompt has 2 places for sounds, and the row has 1 sounds"),
        ([{"type": "audio", "path": "/no/such.wav"}], [tone()], "The sound '/no/such.wav' cannot be read: No such"),
    ],
)
def test_a_row_with_a_bad_sound_is_one_sentence(prompt, sounds, problem):
    row = {"prompt": [{"role": "user", "content": prompt}], "audios": sounds}
    with pytest.raises(ConfigError, match=f"The sounds of a row cannot be played: .*{problem}"):
        with_column_media(row)


def test_a_dataset_of_files_is_played(tmp_path):
    """As `datasets.Audio` gives them where nothing decodes them: their bytes, and their path."""
    (tmp_path / "tone.wav").write_bytes(to_file(Sound(tone(), RATE)))
    rows = Dataset.from_dict({"prompt": ["What is it?"] * 4, "audio": [str(tmp_path / "tone.wav")] * 4})
    trainer = trainer_of(tmp_path, rows=rows.cast_column("audio", Audio(decode=False)))
    batch(trainer)
    part = trainer.batch.trajectories[0].prompt[0]["content"][0]
    assert part["audio"] == Sound(tone(), RATE)


def with_audio(folder: Path, model: Any, processing: Any, **options: Any) -> MTGRPOEnvTrainer:
    rows = Dataset.from_dict({"prompt": ["What is it?"], "audio": ["a.wav"]}).cast_column("audio", Audio(decode=False))
    return MTGRPOEnvTrainer(
        model,
        Player,
        args=MTGRPOConfig(str(folder), **CPU_RUN),
        reward_funcs=words,
        train_dataset=rows,
        processing_class=processing,
        **options,
    )


def test_sounds_for_models_without_ears_are_refused(tmp_path):
    processor = build_processor()
    with pytest.raises(
        ConfigError, match="The column 'audio' of the dataset holds sounds, and the model takes text o"
    ):
        with_audio(tmp_path, build_model(processor.tokenizer), processor.tokenizer)
    with pytest.raises(
        ConfigError, match="holds sounds, and the model takes no sounds: use a model that takes sounds"
    ):
        with_audio(tmp_path, build_vision_model(processor.tokenizer), processor)
    hears, model = SOUND_FAMILIES["qwen2-audio"]()
    with pytest.raises(ConfigError, match="holds sounds, and there is no processor of sounds: pass the model's"):
        with_audio(tmp_path, model, hears.tokenizer)
    with pytest.raises(
        ConfigError, match="holds sounds, and ScriptedEngine is given tokens of text only: sample with"
    ):
        with_audio(tmp_path, model, hears, engine=ScriptedEngine(hears.tokenizer, ["a"]))


def test_sounds_that_nothing_decodes_are_refused(tmp_path):
    rows = Dataset.from_dict({"prompt": ["What is it?"] * 4, "audio": ["a.wav"] * 4}).cast_column("audio", Audio())
    with pytest.raises(ConfigError, match=r"'audio' .* torchcodec, which is not installed: .*datasets.Audio\(decode"):
        trainer_of(tmp_path, rows=rows)


def test_sounds_are_not_sent_to_a_server():
    processor, model = SOUND_FAMILIES["qwen2-audio"]()
    rows = Dataset.from_dict({"prompt": ["What?"], "audio": ["a.wav"]}).cast_column("audio", Audio(decode=False))
    client = VLLMServerClient("http://127.0.0.1:9", processor.tokenizer)
    with pytest.raises(
        ConfigError, match="'audio' .* holds sounds, which are not sent to a vLLM server: set `use_vll"
    ):
        check_media(media_encoder(processor, model.config, client), model.config, client, rows)


def test_a_model_alone_brings_its_processor(tmp_path):
    processor, model = SOUND_FAMILIES["qwen2-audio"]()
    for each in (processor, model):
        each.save_pretrained(tmp_path / "model")
    trainer = MTGRPOEnvTrainer(
        str(tmp_path / "model"),
        Player,
        args=MTGRPOConfig(str(tmp_path / "run"), **CPU_RUN),
        reward_funcs=words,
        train_dataset=ROWS,
    )
    batch(trainer)
    assert [each.error for each in trainer.batch.trajectories] == [None] * 4
