"""Frames to a vision encoder's pixels, in one step on the model's device and equal to the processor's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vlmrb.scoring.vlm.families import Family


def resized_to(processor: Any, inputs: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Returns height and width in pixels to which the processor has brought the frames of a clip.

    Args:
        processor: the model's, of a family with ``sized_by_length``.
        inputs: what it made of the clip, with ``video_grid_thw``.
    """
    _, rows, columns = inputs["video_grid_thw"][0].tolist()
    patch = processor.video_processor.patch_size
    return rows * patch, columns * patch


def encoder_pixels(
    processor: Any,
    family: Family,
    frames: NDArray[np.uint8],
    size: tuple[int, int] | None,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Prepares frames for the vision encoder, all of them as if they were one video.

    Args:
        processor: the model's.
        family: its family.
        frames: ``uint8[U, H, W, 3]``, 0–255.
        size: height and width in pixels to resize to; ``None`` leaves the choice to the processor.
        device: where to compute.

    Returns:
        The video processor's outputs.
    """
    from transformers.image_utils import SizeDict
    from transformers.video_processing_utils import BaseVideoProcessor

    media = processor.video_processor
    video = torch.from_numpy(np.ascontiguousarray(frames)).to(device).permute(0, 3, 1, 2).contiguous()
    arguments = dict(family.video_arguments)
    if size is not None:
        if tuple(video.shape[-2:]) != size:
            video = BaseVideoProcessor.resize(media, video, SizeDict(height=size[0], width=size[1]), media.resample)
        arguments["do_resize"] = False
    found = media(
        videos=[video],
        do_sample_frames=False,
        return_tensors="pt",
        input_data_format="channels_first",
        device=device,
        **arguments,
    )
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
