"""Models for the scorer's benchmark: any id or folder, a small one of a family, a true architecture without weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
SHAPES = Path(__file__).resolve().parent / "shapes"


def load_model(model: str, device: str, dtype: str) -> tuple[Any, Any]:
    """Returns processor and model: an id on the hub, a folder, or one of the families of `small_vlms`.

    Args:
        model: id, folder or family.
        device: as in torch.
        dtype: as in torch, or ``auto``.
    """
    from vlmrb.scoring.vlm.loading import load

    families = small_vlms()
    if model in families.FAMILIES:
        processor, found = families.make_small_vlm(model)
        return processor, found.to(device, None if dtype == "auto" else getattr(torch, dtype)).eval()
    return load(model, None, dtype, device, None)


def random_model(shape: str, device: str, dtype: str) -> tuple[Any, Any]:
    """Returns processor and model of a true Perception-LM architecture with random weights: speed without weights.

    The tokenizer is a small one, so that the prompt's text has some more tokens than the real one's.

    Args:
        shape: name of a file in ``shapes/``, or the path of one like them.
        device: as in torch.
        dtype: as in torch; ``auto`` is bfloat16, as published.
    """
    from transformers import PerceptionLMConfig, PerceptionLMForConditionalGeneration

    known = SHAPES / f"{shape}.json"
    settings = json.loads((known if known.is_file() else Path(shape)).read_text())
    vision = settings["vision_config"]["model_args"]
    processor = small_vlms().perception_lm_processor(
        pixels=vision["img_size"][0], patch=vision["patch_size"], pooling=settings["projector_pooling_ratio"]
    )
    tokenizer = processor.tokenizer
    config = PerceptionLMConfig(
        **settings, image_token_id=tokenizer.image_token_id, video_token_id=tokenizer.video_token_id
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if dtype == "auto" else getattr(torch, dtype))
    try:
        with torch.device(device):
            model = PerceptionLMForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(before)
    return processor, model.eval().requires_grad_(False)


def small_vlms() -> Any:
    """Returns the tests' module of small models."""
    sys.path.append(str(ROOT / "tests" / "scoring"))
    import small_vlms

    return small_vlms
