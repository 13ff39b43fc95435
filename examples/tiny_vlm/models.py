"""Tiny vision-language models of two families, built from nothing: configuration, tokenizer and processor."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from examples.tiny_vlm.clips import FRAME_SIZE, LENGTH
from vlmrb.scoring.prompts import PROMPTS, Prompt

PROMPT = PROMPTS["grid"]
OTHER_PROMPTS = [prompt for prompt in PROMPTS.values() if prompt != PROMPT]
ANSWERS = ("Yes", "No")  # what the models are taught to say; the other spellings they have merely heard of
FAMILIES = ("perception_lm", "smolvlm")

_PATCH, _POOLING = 16, 2
_TOKENS_A_FRAME = (FRAME_SIZE // _PATCH // _POOLING) ** 2
_VISION_WIDTH, _WIDTH, _LAYERS, _HEADS = 48, 64, 2, 4

_CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}{{ '<|' + part['type'] + '|>' }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


class Seen(NamedTuple):
    """The unique frames of some clips.

    Attributes:
        snapshots: ``uint8[F, S]``.
        features: what the language model gets to see of each, ``float32[F, tokens · width]``.
    """

    snapshots: NDArray[np.uint8]
    features: torch.Tensor


def make(family: str) -> tuple[Any, Any]:
    """Builds a processor and an untrained model from the global torch seed.

    Args:
        family: one of ``FAMILIES``.
    """
    return {"perception_lm": _perception_lm, "smolvlm": _smolvlm}[family]()


def load(folder: Path) -> tuple[Any, Any]:
    """Loads a processor and a model to go on training."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    return AutoProcessor.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)


def conversation(frames: Any, prompt: Prompt) -> list[dict[str, Any]]:
    """Returns a question about one clip, ``uint8[L, H, W, 3]``, as a chat."""
    return [{"role": "user", "content": [{"type": "video", "video": frames}, {"type": "text", "text": prompt.text}]}]


def encode(processor: Any, frames: Any, prompts: list[Prompt] | None = None) -> Any:
    """Returns the model's inputs for clips ``uint8[B, L, H, W, 3]`` by the processor's own chat template.

    Args:
        processor: the model's.
        frames: the clips.
        prompts: one for each clip; ``None`` is the model's own prompt for all.
    """
    length, height, width = frames.shape[1:4]
    metadata = {
        "total_num_frames": length,
        "fps": 1.0,
        "width": width,
        "height": height,
        "duration": float(length),
        "frames_indices": list(range(length)),
    }
    return processor.apply_chat_template(
        [conversation(*pair) for pair in zip(frames, prompts or [PROMPT] * len(frames), strict=True)],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"do_sample_frames": False, "video_metadata": [metadata] * len(frames), "padding": True},
    )


def answer_ids(processor: Any) -> tuple[int, int]:
    """Returns the tokens of the two answers, Yes first."""
    yes, no = (processor.tokenizer.encode(word, add_special_tokens=False) for word in ANSWERS)
    assert len(yes) == len(no) == 1, (yes, no)
    return yes[0], no[0]


def frame_features(model: Any, inputs: Any) -> torch.Tensor:
    """Returns what the language model gets to see of each frame, ``float32[frames, tokens · width]``."""
    pixels = inputs[_pixels_name(inputs)]
    return _see(model, pixels).pooler_output.reshape(pixels.shape[0] * pixels.shape[1], -1)


def answer_logits(model: Any, inputs: Any, snapshots: NDArray[np.uint8]) -> tuple[torch.Tensor, Seen]:
    """Returns the logits of the next token after the prompts, ``float32[B, vocabulary]``, and what was seen for them.

    Two frames in three of a grid world equal an earlier one, so each is looked at once and its features are used again:
    the same as the plain call at a fraction of the cost.

    Args:
        model: of either family.
        inputs: of B clips, from ``encode``.
        snapshots: ``uint8[B, L, S]`` of the same clips; equal snapshots have equal frames.
    """
    flat = snapshots.reshape(-1, snapshots.shape[-1])
    _, first, where = np.unique(flat, axis=0, return_index=True, return_inverse=True)
    seen = _see(model, inputs[_pixels_name(inputs)].flatten(0, 1)[first][None])
    features = seen.pooler_output
    seen.pooler_output = features.reshape(len(first), -1, features.shape[-1])[torch.from_numpy(where.reshape(-1))]
    kind = "video" if "pixel_values_videos" in inputs else "image"  # what the model calls them
    text = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    logits = model(**text, mm_encoder_outputs={kind: seen}, use_cache=False, logits_to_keep=1).logits[:, -1]
    return logits, Seen(flat[first], features.reshape(len(first), -1))


def _pixels_name(inputs: Any) -> str:
    return "pixel_values_videos" if "pixel_values_videos" in inputs else "pixel_values"


def _see(model: Any, pixels: torch.Tensor) -> Any:
    outputs = model.model.get_image_features(pixels, return_dict=True)
    if not isinstance(outputs.pooler_output, torch.Tensor):
        outputs.pooler_output = torch.cat(list(outputs.pooler_output))
    return outputs


def _tokenizer(special: dict[str, str], extra: tuple[str, ...] = (), more: tuple[str, ...] = ()) -> Any:
    """Trains a byte-level tokenizer on the prompts and ``more``; all spellings of yes and no are single tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = [space + word for space, word in itertools.product(("", " "), ("yes", "Yes", "YES", "no", "No", "NO"))]
    texts = [*(prompt.text for prompt in PROMPTS.values()), *words * 20, *["user\n", "assistant\n"] * 5, *more]
    marks = ["<|pad|>", "<|begin|>", "<|end|>", "<|start|>", *special.values(), *extra]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[AddedToken(mark, special=True, normalized=False) for mark in marks],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side="left",
        pad_token="<|pad|>",
        bos_token="<|begin|>",
        eos_token="<|end|>",
        extra_special_tokens=special,
    )


def _language(tokenizer: Any, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": _WIDTH,
        "intermediate_size": 2 * _WIDTH,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **more,
    }


def _perception_lm() -> tuple[Any, Any]:
    from transformers import (
        PerceptionLMConfig,
        PerceptionLMForConditionalGeneration,
        PerceptionLMImageProcessor,
        PerceptionLMProcessor,
        PerceptionLMVideoProcessor,
    )

    tokenizer = _tokenizer({"image_token": "<|image|>", "video_token": "<|video|>"})
    size = {"height": FRAME_SIZE, "width": FRAME_SIZE}
    processor = PerceptionLMProcessor(
        PerceptionLMVideoProcessor(size=size),
        PerceptionLMImageProcessor(tile_size=FRAME_SIZE, size=size),
        tokenizer,
        patch_size=_PATCH,
        pooling_ratio=_POOLING,
        chat_template=_CHAT,
    )
    side = FRAME_SIZE // _PATCH
    vision = {
        "model_type": "timm_wrapper",
        "architecture": "vit_pe_core_large_patch14_336",
        "do_pooling": False,
        "model_args": {
            "img_size": [FRAME_SIZE, FRAME_SIZE],
            "patch_size": _PATCH,
            "embed_dim": _VISION_WIDTH,
            "depth": _LAYERS,
            "num_heads": _HEADS,
            "global_pool": "",
            "use_post_transformer_norm": False,
            "init_values": 0.1,
            "ref_feat_shape": [side, side],
            "class_token": True,
        },
    }
    config = PerceptionLMConfig(
        vision_config=vision,
        text_config=_language(tokenizer),
        vision_use_cls_token=True,
        projector_pooling_ratio=_POOLING,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"),
        tie_word_embeddings=True,
    )
    return processor, PerceptionLMForConditionalGeneration(config)


def _smolvlm() -> tuple[Any, Any]:
    from transformers import (
        SmolVLMConfig,
        SmolVLMForConditionalGeneration,
        SmolVLMImageProcessor,
        SmolVLMProcessor,
        SmolVLMVideoProcessor,
    )
    from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

    special = {
        "fake_image_token": "<fake_token_around_image>",
        "image_token": "<image>",
        "end_of_utterance_token": "<end_of_utterance>",
        "global_image_token": "<global-img>",
        "video_token": "<video>",
    }
    stamps = tuple(f"\nFrame from 00:{second:02d}:" for second in range(LENGTH))  # the processor's, spared as bytes
    tokenizer = _tokenizer(
        special, ("<|im_start|>",), (*stamps * 2, "You are provided the following", "User: Assistant:")
    )
    side = {"longest_edge": FRAME_SIZE}
    processor = SmolVLMProcessor(
        SmolVLMImageProcessor(size=side, max_image_size=side, do_image_splitting=False),
        tokenizer,
        SmolVLMVideoProcessor(size=side, max_image_size=side, num_frames=LENGTH, fps=1),
        image_seq_len=_TOKENS_A_FRAME,
        chat_template=DEFAULT_CHAT_TEMPLATE,  # the one that the processor takes for videos whatever it is given
    )
    vision = {
        "hidden_size": _VISION_WIDTH,
        "intermediate_size": 4 * _VISION_WIDTH,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "image_size": FRAME_SIZE,
        "patch_size": _PATCH,
    }
    config = SmolVLMConfig(
        vision_config=vision,
        text_config=_language(tokenizer),
        scale_factor=_POOLING,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
    )
    return processor, SmolVLMForConditionalGeneration(config)
