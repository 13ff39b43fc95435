"""Actions drawn uniformly at random."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrl.data import TensorSpec


def uniform_actions(spec: TensorSpec, count: int, generator: torch.Generator | None) -> Tensor:
    """Draws actions, within their bounds.

    TorchRL's ``spec.rand`` draws from the global generator only.

    Args:
        spec: of one instance's action: categorical, or bounded ``float32[A]`` with finite bounds.
        count: n.
        generator: a CPU generator; ``None`` is the global one.

    Returns:
        ``int64[n]`` or ``float32[n, A]``.

    Raises:
        ValueError: the bounds, or the distance between two, are not finite.
    """
    if hasattr(spec, "n"):
        return torch.randint(int(spec.n), (count,), generator=generator)
    low, high = spec.space.low, spec.space.high
    if not torch.isfinite(high - low).all():
        raise ValueError(
            "actions without finite bounds, of which none can be drawn at random: between "
            f"{low.reshape(-1).tolist()} and {high.reshape(-1).tolist()}"
        )
    return low + (high - low) * torch.rand(count, *spec.shape, generator=generator)
