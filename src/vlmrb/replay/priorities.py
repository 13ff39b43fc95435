"""Priorities of rows: the columns of facts, the terms that read them, and the tree that holds the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from tensordict import TensorDictBase
from torch import Tensor

from vlmrb.replay.columns import Columns, WriteResult, whole_numbers
from vlmrb.replay.sampler import MixtureSampler
from vlmrb.replay.terms import LiveMaximum, PriorityTerm, compose
from vlmrb.replay.writer import BlockWriter


class Priorities:
    """Composes priorities, here and nowhere else, and checks every late write.

    Args:
        capacity: number of slots.
        terms: factors of the priority.
        writer: knows the generations of slots.
        sampler: gets the composed priorities.

    Attributes:
        columns: the facts that the terms read.
        written: column → values written late.
        stale: column → late values dropped, because their slots held other rows by then.

    Raises:
        ValueError: a term makes no finite priority of its column's initial value.
    """

    def __init__(
        self, capacity: int, terms: Sequence[PriorityTerm], writer: BlockWriter, sampler: MixtureSampler
    ) -> None:
        self.terms = list(terms)
        self.columns = Columns(capacity, self.terms)
        self.written = dict.fromkeys(self.columns.specs, 0)
        self.stale = dict.fromkeys(self.columns.specs, 0)
        self._capacity = capacity
        self._writer = writer
        self._sampler = sampler
        self._read_by_terms = {term.column for term in self.terms}
        self._readers = [term for term in self.terms if type(term).values_of is not PriorityTerm.values_of]
        largest_first = {name for term in self.terms for name in term.columns_largest_first()}
        self._largest = {name: LiveMaximum(capacity) for name in sorted(largest_first)}
        # All columns hold their initial values now: a term that cannot take them would fail at every block to come.
        compose(self.terms, self.columns.arrays, np.zeros(1, np.int64), source="a row without late information")

    def gauges(self, size: int) -> dict[str, float]:
        """Returns what shows the terms at work on the first ``size`` rows, those written; nothing if there are none."""
        written = {name: column[:size] for name, column in self.columns.arrays.items()} if size else {}
        return {name: value for term in self.terms if size for name, value in term.gauges(written).items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the columns, the generations and the trees."""
        columns = sum(array.nbytes for array in self.columns.arrays.values()) + self._writer.slot_generations.nbytes
        leaves = 1 << (self._capacity - 1).bit_length()
        return columns + 2 * 8 * leaves * (1 + len(self._largest))

    def fill(self, index: NDArray[np.int64], known: Mapping[str, ArrayLike]) -> None:
        """Sets the columns of rows just written: what is known, and the initial values of all else.

        Args:
            index: ``int64[K]``, consecutive slots, going on at slot 0 after the last one.
            known: column → ``[K]`` or one value for all.
        """
        wraps = index[0] > index[-1]
        at = index if wraps else slice(index[0], index[-1] + 1)
        self.columns.reset(at)
        for name, values in known.items():
            self.columns.arrays[name][at] = values
        for name, largest in self._largest.items():
            largest.forget(index)
            self.columns.arrays[name][at] = largest.value(default=self.columns.specs[name].initial)

    def observe(self, block: TensorDictBase) -> None:
        """Shows the terms a block of raw rows ``[n, T]``."""
        for term in self.terms:
            term.observe(block)

    def end_streams(self) -> None:
        """Tells the terms that all running episodes end here."""
        for term in self.terms:
            term.end_streams()

    def values_of(self, rows: TensorDictBase) -> dict[str, ArrayLike]:
        """Returns what the terms say about rows ``[n, T]`` just stored: column → ``float64[n·T]``."""
        if not self._readers:
            return {}
        flat = rows.reshape(-1)
        return {name: values for term in self._readers for name, values in term.values_of(flat).items()}

    def compose(self, index: NDArray[np.int64], source: str) -> None:
        """Composes the priorities of slots ``int64[K]`` anew; ``source`` says who changed their columns.

        Raises:
            ValueError: a term makes no finite priority of a value.
        """
        self._sampler.set_composed(index, compose(self.terms, self.columns.arrays, index, source))

    def refresh(self, env_steps: int, size: int) -> None:
        """Composes the priorities of all ``size`` rows anew if a term asks for it."""
        due = [term for term in self.terms if term.needs_refresh(env_steps)]
        if due:
            columns = {name: array[:size] for name, array in self.columns.arrays.items()}
            for term in due:
                term.refresh(env_steps, columns)
            self.compose(np.arange(size), source="refresh")

    def restart_clock(self, size: int) -> None:
        """Makes all ``size`` rows as old as env step 0, which it is from now on."""
        self.columns.arrays["env_step"][:size] = 0
        for term in self.terms:
            term.restart_clock()
        if size:
            self.compose(np.arange(size), source="restart_clock")

    def write(
        self,
        name: str,
        index: ArrayLike | Tensor,
        generation: ArrayLike | Tensor,
        value: ArrayLike | Tensor,
        source: str,
    ) -> WriteResult:
        """See `VLMReplayBuffer.write_column`."""
        slots, generations = whole_numbers(index, "index", source), whole_numbers(generation, "generation", source)
        if slots.ndim != 1 or slots.shape != generations.shape:
            shapes = f"{list(slots.shape)} and {list(generations.shape)}"
            raise ValueError(f"{source}: index and generation must be two vectors of one length, got {shapes}")
        values = self.columns.checked(name, len(slots), value, source)
        # A negative slot is a huge unsigned one: both ends in one comparison.
        inside = slots.view(np.uint64) < self._capacity
        now = self._writer.slot_generations.take(slots, mode="clip")
        alive = (now == generations) & (generations >= 0) & inside
        if not alive.all():
            slots, values = slots[alive], values[alive]
        stale = len(alive) - len(slots)
        column = self.columns.arrays[name]
        if name in self._read_by_terms:
            before = column[slots]
            column[slots] = values
            try:
                self.compose(slots, source)
            except Exception:  # whatever a term raises
                column[slots] = before
                raise
        else:
            column[slots] = values
        if name == "score":
            self.columns.arrays["scored"][slots] = True
        if name in self._largest:
            self._largest[name].set(slots, column[slots])
        self.written[name] += len(slots)
        self.stale[name] += stale
        return WriteResult(len(slots), stale)

    def clear(self) -> None:
        """Forgets all rows; the sampler is cleared by the buffer."""
        self.columns.reset(slice(None))
        self._largest = {name: LiveMaximum(self._capacity) for name in self._largest}
        self.written, self.stale = dict.fromkeys(self.written, 0), dict.fromkeys(self.stale, 0)

    def state_dict(self, size: int) -> dict[str, Any]:
        """Returns what belongs to the first ``size`` slots, and the counters, as tensors and plain values."""
        return {
            "columns": self.columns.state_dict(size),
            "known": {name: torch.from_numpy(largest.known(size)) for name, largest in self._largest.items()},
            "terms": {term.name: term.state_dict() for term in self.terms},
            "written": dict(self.written),
            "stale": dict(self.stale),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; the tree of priorities is the sampler's own to restore."""
        self.columns.load_state_dict(state["columns"])
        for name, largest in self._largest.items():
            known = np.flatnonzero(state["known"][name].numpy())
            largest.set(known, self.columns.arrays[name][known])
        for term in self.terms:
            term.load_state_dict(state["terms"][term.name])
        self.written.update(state["written"])
        self.stale.update(state["stale"])
