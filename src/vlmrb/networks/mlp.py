"""Multilayer perceptrons."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def mlp(sizes: Sequence[int], last_layer_scale: float = 1.0, layer_norm: bool = False) -> nn.Sequential:
    """Builds a multilayer perceptron with ReLU between its layers.

    Args:
        sizes: input width, hidden widths, output width.
        last_layer_scale: factor on the last layer's initial weights; 0.1 makes the first action values small and nearly
            equal, which speeds up the start on sparse rewards.
        layer_norm: normalise the inputs of each ReLU. Steadier critics, more time.
    """
    layers: list[nn.Module] = []
    for fan_in, fan_out in zip(sizes[:-2], sizes[1:-1], strict=True):
        layers += [nn.Linear(fan_in, fan_out), *([nn.LayerNorm(fan_out)] if layer_norm else []), nn.ReLU()]
    last = nn.Linear(sizes[-2], sizes[-1])
    with torch.no_grad():
        last.weight.mul_(last_layer_scale)
    return nn.Sequential(*layers, last)
