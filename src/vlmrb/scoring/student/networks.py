"""What judges the parts of clips: one small network for each kind of observations, one logit for each part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vlmrb.scoring.student.parts import Kind

SYMBOLS = 256  # values of a byte


class PartNetwork(nn.Module):
    """Turns inputs ``[K, …]`` of parts into logits ``float32[K]``: how surely each one makes the scorer say yes."""

    def see(self, inputs: Tensor) -> None:
        """Is shown new inputs ``[K, …]``, K ≥ 1, before it learns from them."""


class GridNetwork(PartNetwork):
    """Judges changes of a symbolic grid: cells become sums of learnt vectors, one for each channel's value.

    Args:
        shape: of an input, ``[2, 3, 3, C]``.
        hidden: units.
        embedding: length of a cell's vector.
    """

    def __init__(self, shape: Sequence[int], hidden: int = 64, embedding: int = 8) -> None:
        super().__init__()
        self.channels = nn.ModuleList(nn.Embedding(SYMBOLS, embedding) for _ in range(shape[-1]))
        cells = shape[0] * shape[1] * shape[2]
        self.head = nn.Sequential(nn.Linear(cells * embedding, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        """``uint8[K, 2, 3, 3, C]`` → logits ``float32[K]``."""
        symbols = inputs.long()
        cells = sum(channel(symbols[..., place]) for place, channel in enumerate(self.channels))
        assert isinstance(cells, Tensor)
        return self.head(cells.flatten(1)).squeeze(1)


class VectorNetwork(PartNetwork):
    """Judges transitions between vectors, standardised by mean and deviation of all that it has seen.

    Args:
        shape: of an input, ``[2·D]``.
        hidden: units of each of two layers.
    """

    seen: Tensor
    mean: Tensor
    squares: Tensor

    def __init__(self, shape: Sequence[int], hidden: int = 64) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape[0], dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(shape[0], dtype=torch.float64))  # of deviations, summed
        self.head = nn.Sequential(
            nn.Linear(shape[0], hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def see(self, inputs: Tensor) -> None:
        """Takes inputs into mean and deviation (Chan, Golub and LeVeque's parallel update)."""
        values = inputs.double()
        count, mean = len(values), values.mean(0)
        shift = mean - self.mean
        total = self.seen + count
        self.squares += (values - mean).square().sum(0) + shift.square() * self.seen * count / total
        self.mean += shift * count / total
        self.seen += count

    def forward(self, inputs: Tensor) -> Tensor:
        """``float32[K, 2·D]`` → logits ``float32[K]``."""
        deviation = (self.squares / self.seen.clamp(min=1)).sqrt().clamp(min=1e-6)
        return self.head(((inputs - self.mean) / deviation).float().clamp(-10, 10)).squeeze(1)


class PixelNetwork(PartNetwork):
    """Judges pairs of consecutive images: three convolutions, then the strongest response anywhere.

    Args:
        shape: of an input, ``[2·C, h, w]``.
        hidden: channels.
    """

    def __init__(self, shape: Sequence[int], hidden: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(shape[0], hidden, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.Conv2d(hidden, hidden, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.Conv2d(hidden, hidden, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(hidden, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """``uint8[K, 2·C, h, w]`` → logits ``float32[K]``."""
        before, after = (inputs.float() / 255 - 0.5).chunk(2, 1)
        return self.head(self.body(torch.cat((after, after - before), 1))).squeeze(1)


def make_network(kind: Kind, shape: Sequence[int]) -> PartNetwork:
    """Returns a fresh network.

    Args:
        kind: of observations.
        shape: of one input.
    """
    return {"grid": GridNetwork, "vector": VectorNetwork, "pixels": PixelNetwork}[kind](shape)
