"""Late and fixed facts about rows, one array per column, beside the storage so that sampling does not gather them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from tensordict import TensorDict

from vlmrb.replay.terms import PriorityTerm

_LARGEST = np.finfo(np.float64).max


class WriteResult(NamedTuple):
    """What became of a checked write.

    Attributes:
        written: how many values were written.
        stale: how many were dropped, because their slots hold other rows by now.
    """

    written: int
    stale: int


@dataclass(frozen=True)
class ColumnSpec:
    """A column's type and rules.

    Attributes:
        dtype: NumPy dtype.
        initial: value of rows that have nothing else yet.
        late: whether `VLMReplayBuffer.write_column` may write it; the others are fixed when a row is written.
        low: smallest value accepted.
        high: largest value accepted.
    """

    dtype: type
    initial: float = 0
    late: bool = False
    low: float = -np.inf
    high: float = np.inf


SPECS: dict[str, ColumnSpec] = {
    "clip_id": ColumnSpec(np.int64, -1),  # −1: in no clip
    "episode_id": ColumnSpec(np.int64, -1),
    "position": ColumnSpec(np.int32, 0),  # index of s_t among its clip's frames
    "env_step": ColumnSpec(np.int64, -1),  # env steps collected when the row was written
    "score": ColumnSpec(np.float32, np.nan, late=True, low=0.0, high=1.0),  # NaN: not scored
    "scored": ColumnSpec(np.bool_, False),
    "episode_success": ColumnSpec(np.int8, -1, late=True, low=0, high=1),  # −1: not known
    "td_error": ColumnSpec(np.float64, 1.0, late=True, low=0.0),  # |δ|; of a new row the live maximum
}


class Columns:
    """The columns of a buffer.

    Args:
        capacity: number of slots.
        terms: priority terms; a column that one of them needs and `SPECS` does not have becomes a late float64 column.

    Attributes:
        arrays: name → ``[capacity]``.
        specs: name → rules.
        view: the same memory as a TensorDict ``[capacity]``.
    """

    def __init__(self, capacity: int, terms: Sequence[PriorityTerm]) -> None:
        wanted = {name: initial for term in terms for name, initial in term.own_columns().items()}
        own = {name: ColumnSpec(np.float64, start, late=True) for name, start in wanted.items() if name not in SPECS}
        self.specs = SPECS | own
        self.arrays: dict[str, NDArray] = {
            name: np.full(capacity, spec.initial, spec.dtype) for name, spec in self.specs.items()
        }
        self.view = TensorDict({name: torch.from_numpy(array) for name, array in self.arrays.items()}, [capacity])

    def reset(self, index: NDArray[np.int64] | slice) -> None:
        """Sets all columns of the given slots to their initial values."""
        for name, spec in self.specs.items():
            self.arrays[name][index] = spec.initial

    def checked(self, name: str, count: int, value: Any, source: str) -> NDArray:
        """Returns ``value`` as an array ``[count]`` of the column's dtype.

        Raises:
            ValueError: the column is unknown or fixed, or a value is no number, has the wrong shape, is not finite, out
                of range or, in a column of integers, not whole; names ``source``.
        """
        spec = self.specs.get(name)
        if spec is None or not spec.late:
            late = [column for column, rules in self.specs.items() if rules.late]
            raise ValueError(f"{source}: column {name!r} cannot be written late; those that can: {late}")
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()  # NumPy has no bfloat16
        value = np.asarray(value)
        if value.dtype.kind not in "fiub":
            raise ValueError(f"{source}: values for {name!r} must be numbers, got {value.dtype}")
        if value.shape != (count,):
            raise ValueError(f"{source}: expected {count} values for {name!r}, got shape {list(value.shape)}")
        # NaN fails every comparison, so one look at the extremes finds all that is wrong.
        if count and not (spec.low <= value.min() and value.max() <= min(spec.high, _LARGEST)):
            broken = int((~np.isfinite(value)).sum())
            if broken:
                raise ValueError(f"{source}: {broken} of {count} values for {name!r} are not finite")
            worst = value.min() if value.min() < spec.low else value.max()
            raise ValueError(f"{source}: value {worst} for {name!r} is outside [{spec.low}, {spec.high}]")
        result = value.astype(spec.dtype, copy=False)
        if value.dtype.kind == "f" and result.dtype.kind == "i" and (result != value).any():
            raise ValueError(f"{source}: value {value[result != value][0]} for {name!r} is not a whole number")
        return result

    def state_dict(self, size: int) -> dict[str, Any]:
        """Returns the first ``size`` slots of every column as tensors."""
        return {name: torch.from_numpy(array[:size].copy()) for name, array in self.arrays.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; slots beyond it get their initial values."""
        self.reset(slice(None))
        for name, values in state.items():
            self.arrays[name][: len(values)] = values.numpy()


def whole_numbers(values: ArrayLike | torch.Tensor, name: str, source: str) -> NDArray[np.int64]:
    """Returns whole numbers as an array; raises ValueError naming ``source`` for anything else."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    array = np.ascontiguousarray(values)
    if array.dtype.kind not in "iu" and array.size:  # an empty list is float64
        raise ValueError(f"{source}: {name} must be integers, got {array.dtype}")
    return array.astype(np.int64, copy=False)
