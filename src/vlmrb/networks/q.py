"""Q networks, and the choice of an encoder by what the agent observes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from vlmrb.networks.grid import GridEncoder
from vlmrb.networks.mlp import mlp
from vlmrb.networks.pixels import PixelEncoder


def make_encoder(
    observation_shape: Sequence[int], observation_dtype: torch.dtype, colors: bool = False, pixels: bool = False
) -> tuple[nn.Module, int]:
    """Chooses the encoder: `PixelEncoder` for images, `GridEncoder` for a symbolic grid, else a flat vector.

    Args:
        observation_shape: one observation's shape; ``(W, H, 3)`` of ``uint8`` is taken as a symbolic grid.
        observation_dtype: one observation's dtype.
        colors: see `GridEncoder`.
        pixels: the observation is an image (`vlmrb.networks.pixels.is_image`).

    Returns:
        A module ``[B, …] → float32[B, width]``, and the width.
    """
    encoder: GridEncoder | PixelEncoder
    if pixels:
        encoder = PixelEncoder(observation_shape)
        return encoder, encoder.out_features
    if observation_dtype == torch.uint8 and len(observation_shape) == 3 and observation_shape[-1] == 3:
        encoder = GridEncoder(observation_shape, colors)
        return encoder, encoder.out_features
    flat = len(observation_shape) == 1
    return nn.Identity() if flat else nn.Flatten(-len(observation_shape)), math.prod(observation_shape)


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
