"""Q networks, and the choice of an encoder by what the agent observes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vlmrb.networks.grid import GridEncoder
from vlmrb.networks.mlp import mlp
from vlmrb.networks.pixels import PixelEncoder


class FlatEncoder(nn.Module):
    """Numbers of any dtype as one ``float32`` vector, in their own units: bytes stay 0 to 255.

    Scaling is left to the environment, as nothing here says what a number stands for.

    Args:
        observation_shape: one observation's shape, at least one dimension.
    """

    def __init__(self, observation_shape: Sequence[int]) -> None:
        super().__init__()
        self.dims = len(observation_shape)
        self.out_features = math.prod(observation_shape)

    def forward(self, observation: Tensor) -> Tensor:
        """Returns ``float32[B, out_features]``."""
        return observation.flatten(-self.dims).float()


def make_encoder(
    observation_shape: Sequence[int], observation_dtype: torch.dtype, colors: bool = False, pixels: bool = False
) -> tuple[nn.Module, int]:
    """Chooses the encoder: `PixelEncoder` for images, `GridEncoder` for a symbolic grid, else `FlatEncoder`.

    Args:
        observation_shape: one observation's shape; ``(W, H, 3)`` of ``uint8`` is taken as a symbolic grid.
        observation_dtype: one observation's dtype.
        colors: see `GridEncoder`.
        pixels: the observation is an image (`vlmrb.networks.pixels.is_image`).

    Returns:
        A module ``[B, …] → float32[B, width]``, and the width.
    """
    encoder: GridEncoder | PixelEncoder | FlatEncoder
    if pixels:
        encoder = PixelEncoder(observation_shape)
    elif observation_dtype == torch.uint8 and len(observation_shape) == 3 and observation_shape[-1] == 3:
        encoder = GridEncoder(observation_shape, colors)
    else:
        encoder = FlatEncoder(observation_shape)
    return encoder, encoder.out_features


def make_q_network(
    observation_shape: Sequence[int],
    observation_dtype: torch.dtype,
    num_actions: int,
    hidden_sizes: Sequence[int],
    colors: bool = False,
    pixels: bool = False,
) -> nn.Sequential:
    """Builds a network ``observation → float32[B, num_actions]``; the encoder is `make_encoder`'s.

    Args:
        observation_shape: one observation's shape.
        observation_dtype: one observation's dtype.
        num_actions: number of discrete actions.
        hidden_sizes: widths of the hidden layers.
        colors: see `GridEncoder`.
        pixels: see `make_encoder`.
    """
    encoder, width = make_encoder(observation_shape, observation_dtype, colors, pixels)
    return nn.Sequential(encoder, *mlp([width, *hidden_sizes, num_actions], last_layer_scale=0.1))
