"""Small vision-language models of four families, built from configurations with a tokenizer trained on the spot.

They have seen nothing, so their answers mean nothing; but they are loaded, prompted and run by the same code as the
real ones, and their weights are large enough for every pixel to move the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from vlmrb.scoring.prompts import PROMPTS

FAMILIES = ("perception_lm", "qwen3_vl", "smolvlm", "gemma4")
FRAME_PIXELS = 64
WORDS = [f"{space}{word}" for word in ("yes", "Yes", "YES", "no", "No", "NO") for space in ("", " ")]

_TURNS = (
    "{%% for message in messages %%}<|start|>{{ message['role'] }}\n{%% for part in message['content'] %%}"
    "{%% if part['type'] == 'video' %%}%(video)s{%% elif part['type'] == 'image' %%}%(image)s"
    "{%% else %%}{{ part['text'] }}{%% endif %%}{%% endfor %%}<|end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|start|>assistant\n{%% endif %%}"
)


def build_small_vlm(family: str, folder: Path, seed: int = 0) -> Path:
    """Writes a small model with its processor to ``folder``, as ``save_pretrained`` does; returns the folder."""
    processor, model = make_small_vlm(family, seed)
    processor.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def make_small_vlm(family: str, seed: int = 0) -> tuple[Any, Any]:
    """Returns the processor and the model of a family."""
    torch.manual_seed(seed)
    processor, model = _BUILDERS[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # PyTorch's own spread: with 0.02 the layers would hardly change what they are given
                torch.nn.init.kaiming_uniform_(parameter, a=5**0.5, mode="fan_in")
        model.get_output_embeddings().weight.normal_(std=0.3)
    return processor, model.eval().requires_grad_(False)


def train_tokenizer(named: dict[str, str], words: list[str] | None = None, **kwargs: Any) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE on the words of an answer.

    Args:
        named: special tokens that processors ask for by name, ``{"image_token": "<image>"}``.
        words: what shall be a single token each; ``None`` are all spellings of yes and no, with the prompts.
        kwargs: for ``PreTrainedTokenizerFast``.
    """
    prompts = [prompt.text.lower() for prompt in PROMPTS.values()] if words is None else []
    words = words or WORDS
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<bos>", "<eos>", "<|start|>", "<|end|>", *named.values()]
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(words * 50 + prompts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        extra_special_tokens=named,
        **kwargs,
    )


def _text(tokenizer: PreTrainedTokenizerFast, **changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **changes,
    }


def perception_lm_processor(pixels: int, patch: int, pooling: int) -> Any:
    """Returns a processor of the family for frames of so many pixels a side."""
    from transformers import PerceptionLMProcessor
    from transformers.models.perception_lm.image_processing_perception_lm import PerceptionLMImageProcessor
    from transformers.models.perception_lm.video_processing_perception_lm import PerceptionLMVideoProcessor

    return PerceptionLMProcessor(
        video_processor=PerceptionLMVideoProcessor(size={"height": pixels, "width": pixels}),
        image_processor=PerceptionLMImageProcessor(tile_size=pixels),
        tokenizer=train_tokenizer({"image_token": "<|image|>", "video_token": "<|video|>"}),
        patch_size=patch,
        pooling_ratio=pooling,
        chat_template=_TURNS % {"video": "<|video|>", "image": "<|image|>"},
    )


def _perception_lm() -> tuple[Any, Any]:
    from transformers import PerceptionLMConfig, PerceptionLMForConditionalGeneration

    patch = 16
    processor = perception_lm_processor(FRAME_PIXELS, patch, pooling=2)
    tokenizer = processor.tokenizer
    config = PerceptionLMConfig(
        text_config={"model_type": "llama", **_text(tokenizer)},
        vision_config={
            "model_type": "timm_wrapper",
            "architecture": "vit_pe_core_large_patch14_336",
            "do_pooling": False,
            "model_args": {
                "img_size": [FRAME_PIXELS, FRAME_PIXELS],
                "patch_size": patch,
                "embed_dim": 64,
                "depth": 2,
                "num_heads": 4,
                "global_pool": "",
                "use_post_transformer_norm": False,
                "init_values": 0.1,
                "ref_feat_shape": [FRAME_PIXELS // patch] * 2,
                "class_token": True,
            },
        },
        vision_use_cls_token=True,
        projector_pooling_ratio=2,
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
        tie_word_embeddings=False,
    )
    return processor, PerceptionLMForConditionalGeneration(config)


def _qwen3_vl() -> tuple[Any, Any]:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    tokenizer = train_tokenizer(
        {
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
        }
    )
    config = Qwen3VLConfig(
        text_config=_text(
            tokenizer,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        ),
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
        vision_start_token_id=tokenizer.vision_start_token_id,
        vision_end_token_id=tokenizer.vision_end_token_id,
        tie_word_embeddings=False,
    )
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            patch_size=16, merge_size=2, size={"shortest_edge": 32 * 32, "longest_edge": 1024 * 1024}
        ),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(
            size={"shortest_edge": 32 * 32, "longest_edge": 32 * 256 * 256}, cap_pixels_per_frame=False
        ),
        chat_template=_TURNS
        % {
            "video": "<|vision_start|><|video_pad|><|vision_end|>",
            "image": "<|vision_start|><|image_pad|><|vision_end|>",
        },
    )
    return processor, Qwen3VLForConditionalGeneration(config)


def _smolvlm() -> tuple[Any, Any]:
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMProcessor
    from transformers.models.smolvlm.image_processing_smolvlm import SmolVLMImageProcessor
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

    tokenizer = train_tokenizer(
        {
            "fake_image_token": "<fake_token_around_image>",
            "image_token": "<image>",
            "end_of_utterance_token": "<end_of_utterance>",
            "global_image_token": "<global-img>",
            "video_token": "<video>",
        }
    )
    patch, scale = 16, 2
    config = SmolVLMConfig(
        text_config={"model_type": "llama", **_text(tokenizer)},
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": FRAME_PIXELS,
            "patch_size": patch,
        },
        scale_factor=scale,
        image_token_id=tokenizer.image_token_id,
        tie_word_embeddings=False,
    )
    edge = {"longest_edge": FRAME_PIXELS}
    processor = SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(size=edge, max_image_size=edge, do_image_splitting=False),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(
            size=edge, max_image_size=edge, video_sampling={"max_frames": 64, "fps": 1, "video_size": edge}
        ),
        image_seq_len=(FRAME_PIXELS // patch // scale) ** 2,
        chat_template=_TURNS % {"video": "<video>", "image": "<image>"},
    )
    return processor, SmolVLMForConditionalGeneration(config)


def _gemma4() -> tuple[Any, Any]:
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration, Gemma4Processor
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
    from transformers.models.gemma4.image_processing_gemma4 import Gemma4ImageProcessor
    from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor

    tokenizer = train_tokenizer(
        {
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "video_token": "<|video|>",
        }
    )
    patch, pooling = 4, 2  # 64 tokens a frame: the family knows no fewer
    config = Gemma4Config(
        text_config=_text(
            tokenizer,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=256,
            global_head_dim=16,
            vocab_size_per_layer_input=len(tokenizer),
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=0,
        ),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": patch,
            "pooling_kernel_size": pooling,
            "position_embedding_size": 128,
        },
        audio_config=None,
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
        audio_token_id=tokenizer.audio_token_id,
        boi_token_id=tokenizer.boi_token_id,
        eoi_token_id=tokenizer.eoi_token_id,
        boa_token_id=tokenizer.boa_token_id,
        eoa_token_index=tokenizer.eoa_token_id,
    )
    kernel = {"patch_size": patch, "pooling_kernel_size": pooling, "max_soft_tokens": 70}
    processor = Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(**kernel),
        tokenizer=tokenizer,
        video_processor=Gemma4VideoProcessor(**kernel),
        chat_template=_TURNS % {"video": "<|video|>", "image": "<|image|>"},
    )
    return processor, Gemma4ForConditionalGeneration(config)


def _llava() -> tuple[Any, Any]:
    """Of no family that the scorer knows, and its processor takes no videos."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_clip import CLIPImageProcessor

    tokenizer = train_tokenizer({"image_token": "<image>"})
    patch = 16
    config = LlavaConfig(
        text_config={"model_type": "llama", **_text(tokenizer)},
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": FRAME_PIXELS,
            "patch_size": patch,
            "projection_dim": 32,
        },
        image_token_index=tokenizer.image_token_id,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": FRAME_PIXELS}, crop_size={"height": FRAME_PIXELS, "width": FRAME_PIXELS}
        ),
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_TURNS % {"video": "", "image": "<image>"},
    )
    return processor, LlavaForConditionalGeneration(config)


_BUILDERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "perception_lm": _perception_lm,
    "qwen3_vl": _qwen3_vl,
    "smolvlm": _smolvlm,
    "gemma4": _gemma4,
    "llava": _llava,
}
