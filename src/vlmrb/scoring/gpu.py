"""Does the scorer fit into what is left of the GPU?"""

from __future__ import annotations

from vlmrb.scoring.scorer import Scorer, ScorerError

GIB = 2**30


def require_gpu_memory(scorer: Scorer) -> None:
    """Refuses a scorer that says it needs more GPU memory than is free, before it has loaded for minutes.

    Nothing is looked at without CUDA, for a scorer that does not say what it needs (`Scorer.memory_bytes`), or for one
    whose ``device`` is no CUDA device.

    Raises:
        ScorerError: it does not fit.
    """
    needed = scorer.memory_bytes
    device = str(getattr(scorer, "device", None) or "auto")
    if not needed or not (device == "auto" or device.startswith("cuda")):
        return
    import torch  # here, so that processes of light scorers stay light

    if not torch.cuda.is_available():
        return
    free, total = torch.cuda.mem_get_info("cuda" if device == "auto" else device)
    if needed > free:
        raise ScorerError(
            f"scorer {scorer.name!r} needs {needed / GIB:.1f} GiB of GPU memory, but {free / GIB:.1f} of "
            f"{total / GIB:.1f} GiB are free on {torch.cuda.get_device_name(device if device != 'auto' else None)}: "
            "choose a smaller model, smaller batches (scoring.batch_clips) or another device, or stop what else runs "
            "there"
        )
