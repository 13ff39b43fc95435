"""A small convolutional network for agents that see pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrl.data import Bounded, TensorSpec

LEAST_SIDE = 22  # pixels, below which the convolutions leave nothing
_MOST_CHANNELS = 16
_CHANNELS = (16, 32, 32)


def is_image(spec: TensorSpec) -> bool:
    """Says whether an environment's observations are images: bytes with bounds, as `SimulatorEnv` declares them."""
    return isinstance(spec, Bounded) and spec.dtype == torch.uint8


class PixelEncoder(nn.Module):
    """Three convolutions of kernel 4 and stride 2 with ReLU, flattened; pixels are scaled to [0, 1].

    Args:
        observation_shape: ``(H, W, C)``, ``(C, H, W)``, or ``(K, H, W, C)`` of K stacked frames; there are at most 16
            channels or frames, and at least 22 pixels a side.

    Raises:
        ValueError: the shape is none of these.
    """

    def __init__(self, observation_shape: Sequence[int]) -> None:
        super().__init__()
        shape = tuple(observation_shape)
        self.dims = len(shape)
        self.channels_last = self.dims == 4 or shape[-1] <= _MOST_CHANNELS
        sides = shape[-3:-1] if self.channels_last else shape[-2:]
        channels = math.prod(shape) // math.prod(sides)
        if min(sides) < LEAST_SIDE or (not self.channels_last and channels > _MOST_CHANNELS):
            raise ValueError(
                f"images of shape {shape} cannot be seen: at least {LEAST_SIDE} pixels a side and at most "
                f"{_MOST_CHANNELS} channels are needed; change them by env.wrappers"
            )
        layers: list[nn.Module] = []
        for fan_in, fan_out in zip((channels, *_CHANNELS[:-1]), _CHANNELS, strict=True):
            layers += [nn.Conv2d(fan_in, fan_out, kernel_size=4, stride=2), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Flatten(-3))
        with torch.no_grad():
            self.out_features = self.layers(torch.zeros(1, channels, *sides)).shape[-1]

    def forward(self, observation: Tensor) -> Tensor:
        """Maps ``uint8[B, *observation_shape]`` to ``float32[B, out_features]``."""
        pixels = observation
        if self.channels_last:
            pixels = pixels.movedim(-1, -3)
        if self.dims == 4:
            pixels = pixels.flatten(-4, -3)
        return self.layers(pixels.float() / 255)
