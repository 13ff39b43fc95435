"""Stamps raw one-step rows with clip, episode and position, before n-step returns move anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NestedKey, TensorDictBase
from torchrl.envs.transforms import Transform

from vlmrb.replay.blocks import BlockReader
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
        reader: checks the blocks.
        streams: where each environment is; ``None`` before the first block.
    """

    def __init__(self, clips: ClipStore | None, keep: Sequence[NestedKey], consecutive: bool = True) -> None:
        super().__init__()
        self.clips = clips
        both = [key for key in keep if isinstance(key, str) and ("next", key) in keep]
        self.reader = BlockReader(keep, clips is not None, both[0] if consecutive and both else None)
        self.streams: Streams | None = None
        self._next_episode = 0

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        num_envs = tensordict.shape[0]
        if self.streams is not None and num_envs != self.streams.num_envs:
            raise ValueError(f"expected rows of {self.streams.num_envs} environments as before, got {num_envs}")
        # Everything that can be wrong is found before anything changes.
        block = self.reader.read(tensordict)
        streams = self.streams
        if streams is None:
            streams = Streams(num_envs, self.clips)
            streams.next_episode = self._next_episode
        elif streams.knows_success != (block.success is not None):
            change = "lacked and these have" if block.success is not None else "had and these lack"
            raise ValueError(f"('next', 'success') must be there always or never: rows before {change} it")
        if block.states is not None:
            streams.check_continues(*block.states, block.done)
        self.streams, self.reader.forms = streams, block.forms
        stamp = streams.stamp(block.done, block.success, block.frames)
        return block.rows.set(STAMP, torch.from_numpy(stamp))

    def forget_streams(self) -> None:
        """Lets other environments, of another number, come next; episodes are numbered on."""
        if self.streams is not None:
            self._next_episode, self.streams = self.streams.next_episode, None

    def commit(
        self, slots: NDArray[np.int64], generations: NDArray[np.int64], stamp: NDArray[np.int64], env_steps: int
    ) -> FinishedEpisodes | None:
        """Takes the slots of rows just written; see `Streams.commit`."""
        assert self.streams is not None, "commit follows inv"
        return self.streams.commit(slots, generations, stamp, env_steps)

    def get_extra_state(self) -> dict[str, Any] | None:
        """Returns the streams' state as tensors and numbers."""
        if self.streams is None:
            return None
        return {"num_envs": self.streams.num_envs, "streams": self.streams.state_dict()}

    def set_extra_state(self, state: dict[str, Any] | None) -> None:
        """Restores `get_extra_state`."""
        self.streams = None
        self._next_episode = 0
        if state is not None:
            self.streams = Streams(state["num_envs"], self.clips)
            self.streams.load_state_dict(state["streams"])
