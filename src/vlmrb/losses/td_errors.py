"""|δ| from what TorchRL's losses call ``td_error``: each writes something else under that name."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torchrl.objectives import LossModule, SACLoss, TD3Loss

# As of TorchRL 0.14: the metadata of the critic's loss, by loss. All are unweighted.
ABS_TD_ERROR: dict[type[LossModule], Callable[[Tensor], Tensor]] = {
    SACLoss: lambda written: written,  # |δ|, the larger of the twin critics', [B]
    TD3Loss: lambda written: written.amax(0).sqrt(),  # δ² of each critic, [2, B]
}


def abs_td_error(loss: LossModule, written: Tensor) -> Tensor:
    """Returns the unweighted |δ|, the maximum over the twin critics, ``float32[B]``.

    Args:
        loss: whose critic loss it was.
        written: the ``td_error`` among that loss's metadata.
    """
    return ABS_TD_ERROR[type(loss)](written.detach())
