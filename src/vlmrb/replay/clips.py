"""Keeps each clip's snapshots once, with the slots of its rows, for as long as any of these rows lives."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch, Renderer

# Per clip, beside its id and snapshots: name → (dtype, value when it opens).
_FIELDS: dict[str, tuple[type, Any]] = {
    "episode_id": (np.int64, -1),
    "born": (np.int64, -1),  # env step at which the clip was complete
    "rows": (np.int32, 0),  # rows in all, known when it is closed; 0 while open
    "committed": (np.int32, 0),  # rows that have got a slot so far
    "live": (np.int32, 0),  # rows that still hold their slot
    "score": (np.float32, np.nan),
    "guessed": (np.bool_, False),  # the score is a student's guess
}


class ClipRows(NamedTuple):
    """Living rows of some clips.

    Attributes:
        which: ``int64[K]``, position of each row's clip among the clips asked for.
        slots: ``int64[K]``.
        generations: ``int64[K]``, the slots' generations when the rows were written.
        positions: ``int64[K]``, the rows' places in their clips, 0 to L − 2.
    """

    which: NDArray[np.int64]
    slots: NDArray[np.int64]
    generations: NDArray[np.int64]
    positions: NDArray[np.int64]


class ClipStore:
    """Clips by id: snapshots ``[L, S]``, slots and generations ``int64[L − 1]``.

    A clip *opens* with its first frame, is *closed* when it has L frames or its episode ends, and *complete* when it is
    closed and all its rows have got slots (n-step returns deliver rows late). It is forgotten when it is complete and
    its last row has been overwritten. Ids are given in order and never used again; entries (places in the arrays) are
    recycled.

    Args:
        capacity: slots of the buffer.
        clip_length: L, frames per clip.
    """

    def __init__(self, capacity: int, clip_length: int) -> None:
        self.capacity = capacity
        self.clip_length = clip_length
        self.next_id = 0
        self.clear()

    def clear(self) -> None:
        """Forgets all clips; ids go on, so that a late score cannot meet a new clip."""
        capacity, clip_length = self.capacity, self.clip_length
        self.emitted = 0  # clips ever completed
        self.expired = 0  # clips forgotten without a score
        self._completed: list[int] = []
        self._entry_of: dict[int, int] = {}
        self._free: list[int] = []  # a heap: the lowest entry is used first, so that a restored store goes on alike
        self._entry_of_slot = np.full(capacity, -1, np.int32)
        self._position_of_slot = np.zeros(capacity, np.int32)
        self._ids = np.empty(0, np.int64)
        self._snapshots: NDArray | None = None
        self._slots = np.empty((0, clip_length - 1), np.int64)
        self._generations = np.empty((0, clip_length - 1), np.int64)
        self._fields: dict[str, NDArray] = {name: np.empty(0, dtype) for name, (dtype, _) in _FIELDS.items()}

    def __len__(self) -> int:
        """Number of clips kept, open ones included."""
        return len(self._entry_of)

    # Filled by VLMScoreTransform

    def open(self, episode_ids: NDArray[np.int64], snapshots: NDArray) -> NDArray[np.int64]:
        """Opens clips.

        Args:
            episode_ids: ``int64[K]``.
            snapshots: ``[K, S]``, the first frames.

        Returns:
            ``int64[K]``, their entries; their ids are the next K ones, in order.
        """
        count = len(episode_ids)
        if self._snapshots is None:
            self._snapshots = np.empty((0, self.clip_length, *snapshots.shape[1:]), snapshots.dtype)
        if len(self._free) < count:
            self._grow(count)
        entries = np.array([heapq.heappop(self._free) for _ in range(count)], np.int64)
        ids = np.arange(self.next_id, self.next_id + count)
        self.next_id += count
        self._entry_of.update(zip(ids.tolist(), entries.tolist(), strict=True))
        self._ids[entries] = ids
        self._slots[entries] = -1
        self._generations[entries] = -1
        self._snapshots[entries] = 0  # so that what is saved depends on this run alone
        for name, (_, value) in _FIELDS.items():
            self._fields[name][entries] = value
        self._fields["episode_id"][entries] = episode_ids
        self.add_frames(entries, 0, snapshots)
        return entries

    def add_frames(self, entries: NDArray[np.int64], positions: NDArray[np.int64] | int, snapshots: NDArray) -> None:
        """Writes frames ``[K, S]`` at ``positions`` (``int64[K]``, 0 to L−1) of the clips at ``entries``.

        Raises:
            ValueError: the snapshots' shape or dtype changed.
        """
        assert self._snapshots is not None
        if snapshots.shape[1:] != self._snapshots.shape[2:] or snapshots.dtype != self._snapshots.dtype:
            raise ValueError(
                f"snapshots changed from {self._snapshots.dtype}{list(self._snapshots.shape[2:])} "
                f"to {snapshots.dtype}{list(snapshots.shape[1:])}"
            )
        self._snapshots[entries, positions] = snapshots

    def close(self, entries: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Closes clips that got all their frames, with their numbers of rows, both ``int64[K]``."""
        self._fields["rows"][entries] = rows

    def complete(self, entries: NDArray[np.int64], env_steps: int) -> None:
        """Hands out those of the clips at ``entries``, ``int64[K]``, that are closed and have all their slots."""
        full = entries[self._is_complete(entries)]
        if full.size:
            self._fields["born"][full] = env_steps
            ids = sorted(set(self._ids[full].tolist()))
            self._completed += ids
            self.emitted += len(ids)

    def release(self, index: NDArray[np.int64]) -> None:
        """Lets go of the rows that lived in slots about to be overwritten, ``int64[K]`` without repeats."""
        entries = self._entry_of_slot[index]
        held = entries >= 0
        if not held.any():
            return
        index, entries = index[held], entries[held]
        self._entry_of_slot[index] = -1
        self._slots[entries, self._position_of_slot[index]] = -1
        live = self._fields["live"]
        np.subtract.at(live, entries, 1)
        dead = entries[(live[entries] == 0) & self._is_complete(entries)]
        if dead.size:
            self._forget(set(dead.tolist()))

    def commit(
        self,
        entries: NDArray[np.int64],
        positions: NDArray[np.int64],
        index: NDArray[np.int64],
        generation: NDArray[np.int64],
        env_steps: int,
    ) -> None:
        """Takes the slots of rows just written.

        Args:
            entries: ``int64[K]``, the rows' clips.
            positions: ``int64[K]``, the rows' places in their clips, 0 to L−2.
            index: ``int64[K]``, slots, released before.
            generation: ``int64[K]``.
            env_steps: env steps collected so far.
        """
        self._slots[entries, positions] = index
        self._generations[entries, positions] = generation
        self._entry_of_slot[index] = entries
        self._position_of_slot[index] = positions
        np.add.at(self._fields["live"], entries, 1)
        np.add.at(self._fields["committed"], entries, 1)
        self.complete(entries, env_steps)

    def ids_at(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the clip ids at entries, ``int64[K]``."""
        return self._ids[entries]

    # Read by scoring

    def take_completed(self) -> list[int]:
        """Returns the ids of clips completed since the last call, oldest first; some may be forgotten by now."""
        completed, self._completed = self._completed, []
        return completed

    def hand_out_again(self) -> None:
        """Forgets all scores, and hands out every complete clip as if it had just been completed."""
        entries = np.array(list(self._entry_of.values()), np.int64)
        entries = entries[self._is_complete(entries)]
        self._fields["score"][entries] = np.nan
        self._fields["guessed"][entries] = False
        self._completed = sorted(self._ids[entries].tolist())

    def restart_clock(self) -> None:
        """Makes all complete clips as old as env step 0, which it is from now on."""
        born = self._fields["born"]
        np.minimum(born, 0, out=born)

    def contains(self, clip_id: int) -> bool:
        """Whether any row of the clip lives, so that a score for it would still matter."""
        return clip_id in self._entry_of

    def batch(self, clip_ids: Sequence[int], renderer: Renderer | None = None) -> ClipBatch:
        """Gathers clips for a scorer, shorter ones padded by repeating their last frame.

        Args:
            clip_ids: B ids of complete clips.
            renderer: how to draw the snapshots.

        Returns:
            Snapshots ``[B, L, S]`` and lengths ``int64[B]``, copies that stay valid.

        Raises:
            KeyError: a clip is not kept (any more).
            ValueError: a clip is not closed yet.
        """
        missing = [clip_id for clip_id in clip_ids if clip_id not in self._entry_of]
        if missing:
            raise KeyError(
                f"clips {missing} are not in the store: all their rows have been overwritten, or they never were"
            )
        entries = np.array([self._entry_of[clip_id] for clip_id in clip_ids], np.int64)
        rows = self._fields["rows"][entries].astype(np.int64)
        if (rows == 0).any():
            raise ValueError(f"clips {[c for c, r in zip(clip_ids, rows, strict=True) if r == 0]} are still open")
        assert self._snapshots is not None
        frames = np.minimum(np.arange(self.clip_length), rows[:, None])  # [B, L]
        snapshots = self._snapshots[entries[:, None], frames]
        return ClipBatch(np.array(clip_ids, np.int64), snapshots, rows + 1, renderer)

    def incomplete(self, clip_ids: Sequence[int]) -> list[int]:
        """Returns those of the clips that are kept but not complete, and so were never handed out."""
        kept = [(clip_id, self._entry_of[clip_id]) for clip_id in clip_ids if clip_id in self._entry_of]
        ids, entries = np.array(kept, np.int64).reshape(-1, 2).T
        return ids[~self._is_complete(entries)].tolist()

    def rows_of(self, clip_ids: Sequence[int]) -> ClipRows:
        """Returns the living rows of clips; clips that are not kept have none."""
        kept = [(which, self._entry_of[i]) for which, i in enumerate(clip_ids) if i in self._entry_of]
        which, entries = np.array(kept, np.int64).reshape(-1, 2).T
        slots = self._slots[entries]
        clip, position = np.nonzero(slots >= 0)
        return ClipRows(which[clip], slots[clip, position], self._generations[entries][clip, position], position)

    def rows_at(self, index: NDArray[np.int64]) -> NDArray[np.int32]:
        """Returns how many rows the clips of the rows in slots ``int64[K]`` have in all; 0 of a clip still open."""
        return self._fields["rows"][self._entry_of_slot[index]]

    def set_scores(self, clip_ids: Sequence[int], scores: NDArray[np.float32], guessed: bool = False) -> None:
        """Notes the scores ``float32[B]`` of clips, or guesses of them; those not kept are passed over."""
        for clip_id, score in zip(clip_ids, scores, strict=True):
            entry = self._entry_of.get(clip_id)
            if entry is not None:
                self._fields["score"][entry] = score
                self._fields["guessed"][entry] = guessed

    def score_of(self, clip_id: int) -> float:
        """Returns the score of a clip that is kept, guessed or not; NaN if it has none."""
        return float(self._fields["score"][self._entry_of[clip_id]])

    def scored(self, count: int) -> list[tuple[int, float]]:
        """Returns the latest ``count`` clips with a score that is no guess, and these scores, oldest first."""
        entries = np.array(list(self._entry_of.values()), np.int64)
        entries = entries[~np.isnan(self._fields["score"][entries]) & ~self._fields["guessed"][entries]]
        entries = entries[np.argsort(self._ids[entries])][-count:]
        return list(zip(self._ids[entries].tolist(), self._fields["score"][entries].tolist(), strict=True))

    def table(self) -> dict[str, NDArray]:
        """Returns the complete clips, oldest first: ``clip_id``, and one array per field (score NaN: none yet)."""
        entries = np.array(list(self._entry_of.values()), np.int64)
        entries = entries[self._is_complete(entries)]
        entries = entries[np.argsort(self._ids[entries])]
        return {"clip_id": self._ids[entries]} | {name: array[entries] for name, array in self._fields.items()}

    @property
    def nbytes(self) -> int:
        """Bytes held by clips that are kept."""
        frame = 0 if self._snapshots is None else self._snapshots[:1].nbytes
        per_clip = (
            frame + 16 * (self.clip_length - 1) + 8 + sum(np.dtype(dtype).itemsize for dtype, _ in _FIELDS.values())
        )
        return len(self) * per_clip + self._entry_of_slot.nbytes + self._position_of_slot.nbytes

    # Bookkeeping

    def _is_complete(self, entries: NDArray[np.integer]) -> NDArray[np.bool_]:
        rows = self._fields["rows"][entries]
        return (rows > 0) & (self._fields["committed"][entries] == rows)

    def _forget(self, entries: set[int]) -> None:
        for entry in entries:
            del self._entry_of[int(self._ids[entry])]
            heapq.heappush(self._free, entry)
            self.expired += bool(np.isnan(self._fields["score"][entry]))

    def _grow(self, count: int) -> None:
        """Adds room: at first for a full buffer of full clips (memory is touched only when used), later by half."""
        assert self._snapshots is not None
        old = len(self._ids)
        expected = self.capacity // (self.clip_length - 1) + 2 * count
        new = max(expected, old + old // 2, old + count)

        def grown(array: NDArray) -> NDArray:
            larger = np.empty((new, *array.shape[1:]), array.dtype)
            larger[:old] = array
            return larger

        self._ids, self._slots, self._generations = grown(self._ids), grown(self._slots), grown(self._generations)
        self._snapshots = grown(self._snapshots)
        self._fields = {name: grown(array) for name, array in self._fields.items()}
        self._free += range(old, new)

    # Persistence

    def state_dict(self) -> dict[str, Any]:
        """Returns everything as tensors, numbers and lists."""
        entries = np.array(sorted(self._entry_of.values()), np.int64)
        arrays = {"ids": self._ids, "slots": self._slots, "generations": self._generations, **self._fields}
        if self._snapshots is not None:
            arrays["snapshots"] = self._snapshots
        return {
            "clip_length": self.clip_length,
            "next_id": self.next_id,
            "emitted": self.emitted,
            "expired": self.expired,
            "completed": list(self._completed),
            "entries": torch.from_numpy(entries),
            "arrays": {name: torch.from_numpy(array[entries]) for name, array in arrays.items()},
            "entry_of_slot": torch.from_numpy(self._entry_of_slot.copy()),
            "position_of_slot": torch.from_numpy(self._position_of_slot.copy()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict` of a store with the same capacity and clip length."""
        self.clear()
        entries = state["entries"].numpy()
        arrays = {name: tensor.numpy() for name, tensor in state["arrays"].items()}
        if "snapshots" in arrays:
            shape = arrays["snapshots"].shape[1:]
            self._snapshots = np.empty((0, *shape), arrays["snapshots"].dtype)
            self._grow(int(entries.max(initial=-1)) + 1)
            self._snapshots[entries] = arrays.pop("snapshots")
            self._ids[entries] = arrays.pop("ids")
            self._slots[entries] = arrays.pop("slots")
            self._generations[entries] = arrays.pop("generations")
            for name, (_, default) in _FIELDS.items():  # states of earlier versions lack some
                self._fields[name][entries] = arrays.get(name, default)
            taken = set(entries.tolist())
            self._free = [entry for entry in self._free if entry not in taken]
            self._entry_of = dict(zip(self._ids[entries].tolist(), entries.tolist(), strict=True))
        self._entry_of_slot[:] = state["entry_of_slot"].numpy()
        self._position_of_slot[:] = state["position_of_slot"].numpy()
        self.next_id, self.emitted, self.expired = state["next_id"], state["emitted"], state["expired"]
        self._completed = list(state["completed"])
