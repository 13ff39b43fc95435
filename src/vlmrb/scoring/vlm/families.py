"""What differs between families of vision-language models, as data; one that is not listed takes the plain path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Encoder:
    """How a family's vision encoder is called on its own, and how its features are handed to the rest of the model.

    Attributes:
        method: of the inner model, which turns pixels into features.
        arguments: its arguments → the video processor's outputs.
        slot: the key in ``mm_encoder_outputs`` under which the model looks for these features.
        frames: consecutive frames that share one feature (1, or 2 where the encoder sees pairs).
        listed: the model joins a list of features itself, and takes nothing else.
        sized_by_length: the processor's choice of a size depends on the number of frames, so it must be told.
    """

    method: str
    arguments: Mapping[str, str]
    slot: str
    frames: int = 1
    listed: bool = True
    sized_by_length: bool = False


@dataclass(frozen=True)
class Family:
    """One family's quirks.

    Attributes:
        video_arguments: for the processor, with videos.
        image_arguments: for the processor, with lists of images: one view of each frame at the video's resolution.
        encoder: ``None`` where features cannot be computed apart.
        frame_size: pixels of a frame's side where the model takes any size and cost grows with it.
    """

    video_arguments: Mapping[str, Any] = field(default_factory=dict)
    image_arguments: Mapping[str, Any] = field(default_factory=dict)
    encoder: Encoder | None = None
    frame_size: int | None = None


# By the configuration's model_type. docs/scorers/vlm.md tells what was tried with each.
FAMILIES: dict[str, Family] = {
    "perception_lm": Family(
        image_arguments={"vision_input_type": "vanilla"},  # otherwise 37 tiles a frame
        encoder=Encoder("get_image_features", {"pixel_values": "pixel_values_videos"}, "video", listed=False),
    ),
    "qwen3_vl": Family(
        encoder=Encoder(
            "get_video_features",
            {"pixel_values_videos": "pixel_values_videos", "video_grid_thw": "video_grid_thw"},
            "video",
            frames=2,
            sized_by_length=True,
        ),
        frame_size=256,
    ),
    "smolvlm": Family(
        image_arguments={"do_image_splitting": False},
        encoder=Encoder(
            "get_image_features",
            {"pixel_values": "pixel_values", "pixel_attention_mask": "pixel_attention_mask"},
            "image",
        ),
    ),
    "gemma4": Family(
        image_arguments={"max_soft_tokens": 70},  # what a video's frame gets
        encoder=Encoder(
            "get_video_features",
            {
                "pixel_values_videos": "pixel_values_videos",
                "video_position_ids": "video_position_ids",
                "num_frames_per_video": "num_frames_per_video",
            },
            "video",
        ),
    ),
}

UNKNOWN = Family()


def family_of(model: Any) -> Family:
    """Returns a loaded model's family, `UNKNOWN` if it is none of the listed ones."""
    return FAMILIES.get(getattr(model.config, "model_type", ""), UNKNOWN)


def natural_frame_size(processor: Any, family: Family) -> int | None:
    """Returns the side in pixels of the square frames that a processor need not resize.

    Args:
        processor: the model's.
        family: its family.

    Returns:
        Pixels; ``None`` if the processor does not tell.
    """
    if family.frame_size is not None:
        return family.frame_size
    media: Any = getattr(processor, "video_processor", None) or getattr(processor, "image_processor", None)
    soft_tokens, kernel = getattr(media, "max_soft_tokens", None), getattr(media, "pooling_kernel_size", None)
    if soft_tokens and kernel:  # the largest square of whole pooled patches within the budget
        step = kernel * media.patch_size
        return int((soft_tokens * kernel**2) ** 0.5 * media.patch_size) // step * step
    for name in ("max_image_size", "crop_size", "size"):
        sizes = getattr(media, name, None) or {}
        sides = dict(sizes if isinstance(sizes, Mapping) else vars(sizes))
        if found := sides.get("longest_edge") or sides.get("height") or sides.get("shortest_edge"):
            return int(found)
    return None
