"""A tiny random model of each family that hears, with its processor where that needs no library of its own."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers as hf
from transformers import ProcessorMixin
from transformers.feature_extraction_sequence_utils import SequenceFeatureExtractor
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.granite_speech.feature_extraction_granite_speech import GraniteSpeechFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from support.vision import CHATML, SLIDING, Family, _random, _tokenizer, _vocabulary, gemma4_layers

RATE = 800
"""Samples per second of the tiny processors."""
ENCODER = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "num_mel_bins": 8}

CHATML = CHATML.replace("'IMAGE' if part['type'] == 'image'", "'SOUND' if part['type'] == 'audio'")
"""A short template in the form of those that come with these models."""


def tone(pitch: float = 40.0, seconds: float = 1.0, rate: int = RATE) -> np.ndarray:
    """Samples of a tone that grows louder."""
    time = np.arange(int(seconds * rate)) / rate
    return (np.sin(2 * np.pi * pitch * time) * np.linspace(0.1, 0.8, len(time))).astype(np.float32)


def _whisper(chunk: int = 4) -> hf.WhisperFeatureExtractor:
    return hf.WhisperFeatureExtractor(
        feature_size=8, sampling_rate=RATE, hop_length=20, n_fft=80, chunk_length=chunk, return_attention_mask=True
    )


def _qwen2_audio() -> Family:
    special = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
    tokenizer = _tokenizer(CHATML.replace("SOUND", "<|audio_bos|><|AUDIO|><|audio_eos|>"), special, "<|im_end|>")
    processor = hf.Qwen2AudioProcessor(_whisper(), tokenizer, chat_template=tokenizer.chat_template)
    config = hf.Qwen2AudioConfig(
        text_config=_vocabulary(tokenizer, model_type="qwen2"),
        audio_config={**ENCODER, "model_type": "qwen2_audio_encoder", "max_source_positions": 80},
        audio_token_id=processor.audio_token_id,
    )
    return processor, _random(hf.Qwen2AudioForConditionalGeneration, config)


def _flamingo(glm: bool) -> Family:
    token = "<|pad|>" if glm else "<sound>"
    tokenizer = _tokenizer(CHATML.replace("SOUND", token), [token], "<|im_end|>")
    processor = (hf.GlmAsrProcessor if glm else hf.AudioFlamingo3Processor)(
        _whisper(), tokenizer, chat_template=tokenizer.chat_template, audio_token=token, max_audio_len=8
    )
    text = {"text_config": _vocabulary(tokenizer, model_type="llama" if glm else "qwen2")}
    token = processor.audio_token_id
    if glm:
        encoder = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = hf.GlmAsrConfig(**text, audio_config={**encoder, "num_mel_bins": 8}, audio_token_id=token)
        return processor, _random(hf.GlmAsrForConditionalGeneration, config)
    encoder = {**ENCODER, "model_type": "audioflamingo3_encoder", "max_source_positions": 80}
    config = hf.AudioFlamingo3Config(**text, audio_config=encoder, audio_token_id=token)
    return processor, _random(hf.AudioFlamingo3ForConditionalGeneration, config)


class _Voxtral(ProcessorMixin):
    """As Voxtral's, whose tokens are Mistral's own: pieces of four seconds, a token for four frames."""

    def __init__(self, feature_extractor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        super().__init__(feature_extractor, tokenizer, chat_template=chat_template)
        self.audio_token = "[AUDIO]"
        self.audio_token_id = tokenizer.convert_tokens_to_ids("[AUDIO]")

    def _process_audio(self, audio: Any, **options: Any) -> Any:
        found, tokens = [], []
        for sound in audio:
            pieces = [sound[begin : begin + 4 * RATE] for begin in range(0, len(sound), 4 * RATE)]
            made = self.feature_extractor(pieces, sampling_rate=RATE, padding="max_length", return_tensors="pt")
            found.append(made["input_features"])
            tokens.append(self.audio_token * 20 * len(pieces))
        return {"input_features": torch.cat(found)}, tokens


def _voxtral() -> Family:
    tokenizer = _tokenizer(CHATML.replace("SOUND", "[BEGIN_AUDIO][AUDIO]"), ["[AUDIO]", "[BEGIN_AUDIO]"], "<|im_end|>")
    processor = _Voxtral(_whisper(), tokenizer, chat_template=tokenizer.chat_template)
    config = hf.VoxtralConfig(
        text_config=_vocabulary(tokenizer, model_type="llama"),
        audio_config={**ENCODER, "encoder_ffn_dim": 64, "max_source_positions": 80},
        audio_token_id=processor.audio_token_id,
    )
    return processor, _random(hf.VoxtralForConditionalGeneration, config)


class _Omni(ProcessorMixin):
    """Qwen2.5-Omni's processor without its part for videos, which needs torchvision."""

    def __init__(self, image_processor: Any, feature_extractor: Any, tokenizer: Any, chat_template: Any) -> None:
        super().__init__(image_processor, feature_extractor, tokenizer, chat_template=chat_template)
        self.audio_token, self.image_token = "<|AUDIO|>", "<|IMAGE|>"
        self.audio_token_id, self.image_token_id = tokenizer.convert_tokens_to_ids(
            [self.audio_token, self.image_token]
        )

    def _process_audio(self, audio: Any, **options: Any) -> Any:
        found = self.feature_extractor(
            audio, **{**options, "padding": "max_length", "return_attention_mask": True, "return_tensors": "pt"}
        )
        found["feature_attention_mask"] = found.pop("attention_mask")
        sizes = ((found["feature_attention_mask"].sum(-1) - 1) // 2 + 1 - 2) // 2 + 1
        return found, [self.audio_token * int(size) for size in sizes]

    def replace_image_token(self, image_inputs: dict, image_idx: int, **kwargs: Any) -> str:
        return self.image_token * int(image_inputs["image_grid_thw"][image_idx].prod() // 4)

    @property
    def model_input_names(self) -> list[str]:
        return [*super().model_input_names, "feature_attention_mask"]


def _omni() -> Family:
    special = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|IMAGE|>", "<|vision_bos|>", "<|vision_eos|>"]
    shown = "' if part['type'] == 'audio' else '<|vision_bos|><|IMAGE|><|vision_eos|>' if part['type'] == 'image"
    template = CHATML.replace("SOUND' if part['type'] == 'audio", "<|audio_bos|><|AUDIO|><|audio_eos|>" + shown)
    tokenizer = _tokenizer(template, [*special, "<|VIDEO|>"], "<|im_end|>")
    images = Qwen2VLImageProcessorPil(
        min_pixels=64, max_pixels=4096, patch_size=4, temporal_patch_size=2, merge_size=2
    )
    processor = _Omni(images, _whisper(), tokenizer, chat_template=tokenizer.chat_template)
    named = ["audio_token_index", "audio_start_token_id", "audio_end_token_id"]
    named += ["image_token_index", "vision_start_token_id", "vision_end_token_id", "video_token_index"]
    rope = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 1, 1]}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]}
    config = hf.Qwen2_5OmniThinkerConfig(
        text_config=_vocabulary(tokenizer, rope_parameters=rope),
        audio_config={**ENCODER, "max_source_positions": 80, "n_window": 8, "output_dim": 32},
        vision_config=vision,
        **dict(zip(named, tokenizer.convert_tokens_to_ids([*special, "<|VIDEO|>"]), strict=True)),
    )
    return processor, _random(hf.Qwen2_5OmniThinkerForConditionalGeneration, config)


class _Gemma4(hf.Gemma4Processor):
    """Without its parts for images and videos."""

    def __init__(self, feature_extractor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
        self.audio_token, self.boa_token, self.eoa_token = "<|audio|>", "<|audio>", "<audio|>"
        self.audio_token_id = tokenizer.convert_tokens_to_ids("<|audio|>")
        self.image_token = self.video_token = None
        ProcessorMixin.__init__(self, feature_extractor, tokenizer, chat_template=chat_template)


def _gemma4() -> Family:
    special = ["<bos>", "<|turn>", "<|audio|>", "<|audio>", "<audio|>", "<|channel>", "<channel|>", "<|image|>"]
    tokenizer = _tokenizer("gemma4_v5", special, "<turn|>")
    tokenizer.bos_token = "<bos>"
    extractor = Gemma4AudioFeatureExtractor(
        feature_size=32, sampling_rate=RATE, max_frequency=RATE / 2, frame_length_ms=100.0, hop_length_ms=25.0
    )
    processor = _Gemma4(extractor, tokenizer, chat_template=tokenizer.chat_template)
    encoder = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 24}
    encoder |= {"subsampling_conv_channels": [32, 4], "use_clipped_linears": False}
    config = hf.Gemma4Config(
        text_config=_vocabulary(tokenizer, **SLIDING, **gemma4_layers(tokenizer)),
        vision_config=None,
        audio_config=encoder,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image|>"),
        audio_token_id=processor.audio_token_id,
    )
    return processor, _random(hf.Gemma4ForConditionalGeneration, config)


class _GraniteFeatures(GraniteSpeechFeatureExtractor):
    """Spectra as Granite's, which needs torchaudio: padded with zeros to the longest of a batch."""

    def __init__(self, sampling_rate: int = RATE, **options: Any) -> None:
        SequenceFeatureExtractor.__init__(self, feature_size=8, sampling_rate=sampling_rate, padding_value=0.0)
        self.melspec_kwargs = {"hop_length": 20}
        self.projector_window_size, self.projector_downsample_rate = 15, 5

    def __call__(self, audios: Any, device: str | None = "cpu") -> hf.BatchFeature:
        batch, lengths = self._get_audios_and_audio_lengths(audios)
        frames = torch.stft(batch, 80, 20, window=torch.hann_window(80), return_complex=True).abs()[:, :8].log1p()
        frames = frames.transpose(1, 2)
        sizes = self._get_num_audio_features(lengths)
        mask = torch.arange(max(sizes))[None] < torch.tensor(sizes)[:, None]
        stacked = frames[:, : frames.size(1) // 2 * 2].reshape(len(batch), -1, 16)
        return hf.BatchFeature({"input_features": stacked, "audio_embed_sizes": sizes, "input_features_mask": mask})


def granite() -> Family:
    """Granite Speech's, which hears a sound otherwise beside a longer one: its encoder sees the padding."""
    tokenizer = _tokenizer(CHATML.replace("SOUND", "<|audio|>"), ["<|audio|>"], "<|im_end|>")
    processor = hf.GraniteSpeechProcessor(_GraniteFeatures(), tokenizer, chat_template=tokenizer.chat_template)
    encoder = {"input_dim": 16, "num_layers": 2, "hidden_dim": 16, "num_heads": 2, "dim_head": 8}
    encoder |= {"context_size": 20, "output_dim": 8, "max_pos_emb": 32}
    projector = {"model_type": "blip_2_qformer", "cross_attention_frequency": 1, "use_qformer_text_input": False}
    projector |= {"hidden_size": 16, "encoder_hidden_size": 16, "intermediate_size": 32}
    projector |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.GraniteSpeechConfig(
        text_config=_vocabulary(tokenizer, model_type="granite"),
        encoder_config=encoder,
        projector_config=projector,
        audio_token_index=tokenizer.convert_tokens_to_ids("<|audio|>"),
        has_lora_adapter=False,
        tie_word_embeddings=False,
    )
    return processor, _random(hf.GraniteSpeechForConditionalGeneration, config)


SOUND_FAMILIES: dict[str, Callable[[], Family]] = {
    "qwen2-audio": _qwen2_audio,
    "qwen2.5-omni": _omni,
    "audio flamingo 3": lambda: _flamingo(glm=False),
    "glm-asr": lambda: _flamingo(glm=True),
    "voxtral": _voxtral,
    "gemma 4": _gemma4,
}
"""What makes a processor and a model of each family."""
