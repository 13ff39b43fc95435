"""Stamps raw one-step rows with clip, episode and position, before n-step returns move anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.envs.transforms import Transform

from vlmrb.replay.clips import ClipStore
from vlmrb.replay.streams import FinishedEpisodes, Streams

STAMP = "stamp"


class VLMScoreTransform(Transform):
    """Takes ``snapshot`` and ``success`` off raw rows and stamps them, on the way into the buffer.

    `inv` sees blocks ``[n, T]`` of consecutive one-step rows of n environments. After the write the buffer calls
    `commit` with the slots that the rows have got; a clip is complete when all its rows have one.

    Args:
        clips: where clips go; ``None`` keeps no clips, only episodes.
        keep: keys that stay in the rows; all others are dropped.
        consecutive: whether rows must continue each other, as clips and n-step returns need.

    Attributes:
        streams: where each environment is; ``None`` before the first block.
    """

    def __init__(self, clips: ClipStore | None, keep: Sequence[NestedKey], consecutive: bool = True) -> None:
        super().__init__()
        self.clips = clips
        self.keep = list(keep)
        both = [key for key in self.keep if isinstance(key, str) and ("next", key) in self.keep]
        self._continues = both[0] if consecutive and both else None  # a key in which s' of a row shows as s of the next
        self.streams: Streams | None = None

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        num_envs = tensordict.shape[0]
        if self.streams is not None and num_envs != self.streams.num_envs:
            raise ValueError(f"expected rows of {self.streams.num_envs} environments as before, got {num_envs}")
        try:  # everything that can be missing is read before anything changes
            rows = tensordict.select(*self.keep)
            after = tensordict["next"]
            done = _flags(after["done"])
            frames = None
            if self.clips is not None:
                frames = tensordict["snapshot"].numpy(), after["snapshot"].numpy()
        except KeyError as error:
            raise ValueError(self._missing(tensordict)) from error
        if self.streams is None:
            self.streams = Streams(num_envs, self.clips)
        if self._continues is not None:
            self.streams.check_continues(rows[self._continues].numpy(), after[self._continues].numpy(), done)
        success = after.get("success", None)
        stamp = self.streams.stamp(done, None if success is None else _flags(success), frames)
        return rows.set(STAMP, torch.from_numpy(stamp))

    def commit(
        self, slots: NDArray[np.int64], generations: NDArray[np.int64], stamp: NDArray[np.int64], env_steps: int
    ) -> FinishedEpisodes | None:
        """Takes the slots of rows just written; see `Streams.commit`."""
        assert self.streams is not None, "commit follows inv"
        return self.streams.commit(slots, generations, stamp, env_steps)

    def _missing(self, data: TensorDictBase) -> str:
        present = data.keys(include_nested=True)
        missing = [key for key in (*self.keep, ("next", "done")) if key not in present]
        if missing:
            return f"the rows lack {missing}; they have {sorted(map(str, present))}"
        return "clips need 'snapshot' and ('next', 'snapshot') in the rows: add them, or set clip_length to None"

    def get_extra_state(self) -> dict[str, Any] | None:
        """Returns the streams' state as tensors and numbers."""
        if self.streams is None:
            return None
        return {"num_envs": self.streams.num_envs, "streams": self.streams.state_dict()}

    def set_extra_state(self, state: dict[str, Any] | None) -> None:
        """Restores `get_extra_state`."""
        self.streams = None
        if state is not None:
            self.streams = Streams(state["num_envs"], self.clips)
            self.streams.load_state_dict(state["streams"])


def _flags(tensor: Tensor) -> NDArray[np.bool_]:
    """``bool[n, T, 1]`` or ``bool[n, T]`` → ``bool[n, T]``."""
    return tensor.reshape(tensor.shape[:2]).numpy()
