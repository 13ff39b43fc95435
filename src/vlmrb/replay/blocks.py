"""Reads blocks of rows as they come in, and refuses what is wrong with them before anything has changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from vlmrb.replay.storage import nest

REWARD, DONE, SUCCESS = ("next", "reward"), ("next", "done"), ("next", "success")
_FLAGS = (DONE, ("next", "terminated"), ("next", "truncated"), SUCCESS)


class Form(NamedTuple):
    """What a key of one row looks like.

    Attributes:
        shape: without the dimensions that count rows.
        dtype: of the tensor.
    """

    shape: torch.Size
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Block(NamedTuple):
    """What is needed of a block of rows.

    Attributes:
        rows: ``[n, T]``, the keys that are stored.
        done: ``bool[n, T]``.
        success: ``bool[n, T]``; ``None`` if the rows do not say.
        frames: snapshots ``[n, T, S]`` before and after each row; ``None`` without clips.
        states: the same of the key in which s' of a row shows as s of the next; ``None`` without one.
        forms: key → what it looks like.
    """

    rows: TensorDictBase
    done: NDArray[np.bool_]
    success: NDArray[np.bool_] | None
    frames: tuple[NDArray, NDArray] | None
    states: tuple[NDArray, NDArray] | None
    forms: dict[NestedKey, Form]


class BlockReader:
    """Checks that blocks have all that is needed, in the shapes and dtypes of the first one.

    Args:
        keep: keys of the rows that are stored.
        snapshots: whether clips need snapshots.
        continues: key in which s' of a row shows as s of the next; ``None`` if rows need not continue each other.

    Attributes:
        forms: key → what it looks like in the blocks accepted so far; whoever accepts the first one sets it.
    """

    def __init__(self, keep: Sequence[NestedKey], snapshots: bool, continues: str | None) -> None:
        self.keep = list(keep)
        self.forms: dict[NestedKey, Form] = {}
        self._snapshots = snapshots
        self._continues = continues
        self._taken_off = {"snapshot", ("next", "snapshot")} - set(self.keep)

    def read(self, data: TensorDictBase) -> Block:
        """Reads a block ``[n, T]``; the result shares its memory.

        Raises:
            ValueError: a key is missing, has another shape or dtype than in the first block, or one that is stored has
                values that are not finite.
        """
        forms = self.forms or self._learn(data)
        get = data._get_tuple  # `get` at half its time
        leaves = {key: get(key if isinstance(key, tuple) else (key,), None) for key in forms}
        for key, form in forms.items():
            leaf = leaves[key]
            if leaf is None:
                raise ValueError(self._missing(data))
            if leaf.dtype != form.dtype or leaf.shape[2:] != form.shape:
                got = Form(leaf.shape[2:], leaf.dtype)
                raise ValueError(f"{_name(key)}: expected {form} in each row, got {got}")
        shape = data.shape
        done, success = (_flags(get(key, None), key, shape) for key in (DONE, SUCCESS))
        if done is None:
            raise ValueError(self._missing(data))
        for key, form in forms.items():  # one NaN would spread through the networks to every weight
            if form.dtype.is_floating_point and key not in self._taken_off:
                _require_finite(leaves[key], key)
        frames = self._pair(leaves, "snapshot") if self._snapshots else None
        continues = self._continues if self._continues in leaves else None
        states = None if continues is None else self._pair(leaves, continues)
        stored = (
            leaves if not self._snapshots else {key: leaf for key, leaf in leaves.items() if key not in self._taken_off}
        )
        return Block(nest(stored, *shape), done, success, frames, states, forms)

    def expect(self, leaves: Iterable[tuple[NestedKey, Tensor]], batch_dims: int, snapshots: Tensor | None) -> None:
        """Expects what rows looked like that were saved.

        Args:
            leaves: key → stored rows, with ``batch_dims`` dimensions that count rows.
            batch_dims: see there.
            snapshots: of clips, ``[K, L, S]``.
        """
        self.forms = {key: Form(leaf.shape[batch_dims:], leaf.dtype) for key, leaf in leaves}
        if self._snapshots and snapshots is not None:
            self.forms |= dict.fromkeys(("snapshot", ("next", "snapshot")), Form(snapshots.shape[2:], snapshots.dtype))

    def _learn(self, data: TensorDictBase) -> dict[NestedKey, Form]:
        """Returns what the keys of a first block look like."""
        try:
            keys: list[NestedKey] = list(data.select(*self.keep).keys(include_nested=True, leaves_only=True))
            keys += [key for key in ("snapshot", ("next", "snapshot")) if self._snapshots and key not in keys]
            forms = {key: Form(data[key].shape[2:], data[key].dtype) for key in keys}
        except KeyError as error:
            raise ValueError(self._missing(data)) from error
        for key in ("snapshot", self._continues):
            if key in forms and ("next", key) in forms:
                forms["next", key] = forms[key]
        for key, form in forms.items():
            dtypes = (torch.bool,) if key in _FLAGS else (torch.float32, torch.float64) if key == REWARD else None
            if dtypes and not (form.dtype in dtypes and form.shape in ((), (1,))):
                raise ValueError(f"{_name(key)}: expected {Form(torch.Size([1]), dtypes[0])} in each row, got {form}")
        return forms

    @staticmethod
    def _pair(leaves: Mapping[NestedKey, Tensor], key: str) -> tuple[NDArray, NDArray]:
        return leaves[key].numpy(), leaves["next", key].numpy()

    def _missing(self, data: TensorDictBase) -> str:
        present = data.keys(include_nested=True)
        missing = [key for key in (*self.keep, DONE) if key not in present]
        if missing:
            return f"the rows lack {missing}; they have {sorted(map(str, present))}"
        return "clips need 'snapshot' and ('next', 'snapshot') in the rows: add them, or set clip_length to None"


def _flags(leaf: Tensor | None, key: NestedKey, shape: torch.Size) -> NDArray[np.bool_] | None:
    """``bool[n, T, 1]`` or ``bool[n, T]`` → ``bool[n, T]``."""
    if leaf is None:
        return None
    if leaf.dtype != torch.bool or leaf.numel() != shape.numel():
        raise ValueError(f"{_name(key)}: expected bool[1] in each row, got {Form(leaf.shape[2:], leaf.dtype)}")
    return leaf.numpy().reshape(shape)


def _require_finite(leaf: Tensor, key: NestedKey) -> None:
    finite = np.isfinite((leaf.float() if leaf.dtype == torch.bfloat16 else leaf).numpy())  # NumPy has no bfloat16
    if not finite.all():
        raise ValueError(f"{_name(key)}: {np.count_nonzero(~finite)} of {finite.size} values are not finite")


def _name(key: NestedKey) -> str:
    return key if isinstance(key, str) else ".".join(key)
