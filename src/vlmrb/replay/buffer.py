"""The replay buffer: rows, columns beside them, priorities from terms, clips and their late scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

from vlmrb.replay.blocks import Form
from vlmrb.replay.clip_writes import write_clip_credit, write_clip_scores
from vlmrb.replay.clips import ClipStore
from vlmrb.replay.columns import WriteResult
from vlmrb.replay.hindsight import NEXT, HindsightTransform
from vlmrb.replay.monitor import SampleMonitor
from vlmrb.replay.nstep import NStepTransform
from vlmrb.replay.persistence import buffer_state, load_buffer_state
from vlmrb.replay.priorities import Priorities
from vlmrb.replay.reports import counters, frequencies, gauges, held_bytes
from vlmrb.replay.sampler import MixtureSampler
from vlmrb.replay.schedule import LinearSchedule
from vlmrb.replay.score_reward import ScoreRewardTransform
from vlmrb.replay.similarity import STATE, SimilaritySelector
from vlmrb.replay.storage import GIB, Placement
from vlmrb.replay.streams import ENTRY, EPISODE, POSITION
from vlmrb.replay.terms import PriorityTerm, VLMTerm
from vlmrb.replay.transform import STAMP, VLMScoreTransform
from vlmrb.replay.writer import BlockWriter

ROW_KEYS: tuple[NestedKey, ...] = (
    "observation",
    "action",
    ("next", "observation"),
    ("next", "reward"),
    ("next", "done"),
    ("next", "terminated"),
)


class VLMReplayBuffer(TensorDictPrioritizedReplayBuffer):
    """Replay whose priorities are a product of terms, one of which, the clip's score, arrives late.

    ::

        buffer = VLMReplayBuffer(100_000, terms=[VLMTerm()], lam=0.5, clip_length=32)
        for block in collector:                                  # [n_envs, T] rows with snapshots
            buffer.extend(block)
            ids = buffer.clips.take_completed()
            buffer.write_scores(ids, score(buffer.clips.batch(ids)), source="my scorer")
            batch = buffer.sample()
            buffer.update_td_error(batch, abs_td_error)

    Not thread-safe: write, sample and update on one thread, and let scorers work on copies (`ClipStore.batch`).

    Args:
        capacity: rows kept.
        batch_size: rows per sample.
        terms: factors of the priority; none draws uniformly.
        lam: λ, a number, or a schedule over env steps that `set_env_steps` follows.
        beta: exponent of the importance weights, likewise; ``None`` emits no weights.
        clip_length: frames per clip, ≥ 2; ``None`` keeps no clips and needs no snapshots.
        n_steps: steps of the return.
        gamma: discount factor per step.
        max_draws_per_positive: see `MixtureSampler`.
        stratified: see `MixtureSampler`.
        selector: chooses each batch among candidates that are drawn as the rows of a batch otherwise are; ``None``
            draws the batch itself.
        score_reward: adds clips' scores to the rewards of rows on their way out; ``None`` adds nothing.
        hindsight: exchanges the goals of rows on their way out; ``None`` leaves them.
        keep: keys of the rows that are stored; everything else that a collector delivers is dropped.
        storage: ``memory``, ``memmap``, or ``auto``: memory-mapped if the rows would exceed ``memory_limit_gib``.
        scratch_dir: where the folder for memory-mapped rows is made; ``None`` is the system's temporary one.
        memory_limit_gib: see ``storage``.
        seed: of the generator that sampling draws from.

    Attributes:
        clips: the clip store; ``None`` without clips.
        selector: see there.
        env_steps: env steps collected so far.
    """

    def __init__(
        self,
        capacity: int,
        *,
        batch_size: int = 128,
        terms: Sequence[PriorityTerm] = (),
        lam: float | LinearSchedule = 0.0,
        beta: float | LinearSchedule | None = None,
        clip_length: int | None = None,
        n_steps: int = 1,
        gamma: float = 0.99,
        max_draws_per_positive: float | None = None,
        stratified: bool = False,
        selector: SimilaritySelector | None = None,
        score_reward: ScoreRewardTransform | None = None,
        hindsight: HindsightTransform | None = None,
        keep: Sequence[NestedKey] = ROW_KEYS,
        storage: Literal["auto", "memory", "memmap"] = "auto",
        scratch_dir: str | Path | None = None,
        memory_limit_gib: float = 8.0,
        seed: int = 0,
    ) -> None:
        if batch_size < 1 or capacity < batch_size:
            raise ValueError(
                f"capacity={capacity} must hold at least one batch of batch_size={batch_size} rows, and that one row"
            )
        if clip_length is not None and clip_length < 2:
            raise ValueError(f"clip_length={clip_length} must be at least 2 frames: a clip needs one transition")
        if n_steps < 1:
            raise ValueError(f"n_steps={n_steps} must be at least 1")
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma={gamma} must lie in [0, 1]")
        names = [term.name for term in terms]
        if len(set(names)) < len(names):
            raise ValueError(f"two priority terms share a name: {names}")
        if clip_length is None and any(isinstance(term, VLMTerm) for term in terms):
            raise ValueError("the vlm term needs clips to score: set clip_length")
        if clip_length is None and score_reward is not None:
            raise ValueError("scores as rewards need clips to score: set clip_length")
        if hindsight is not None and n_steps > 1:
            raise ValueError(f"hindsight judges single steps anew: n_steps must be 1, got {n_steps}")
        if selector is not None and not {STATE, ("next", STATE)} <= set(keep):
            raise ValueError(f"a selector compares states: keep {STATE!r} and ('next', {STATE!r})")
        # The base class builds its own sampler and writer, which are replaced; only then does it know the generator.
        super().__init__(alpha=1.0, beta=0.0, storage=LazyTensorStorage(capacity, device="auto"), batch_size=batch_size)
        self.capacity = capacity
        self.n_steps = n_steps
        self.selector = selector
        self.env_steps = 0
        self._placement = Placement(storage, scratch_dir, int(memory_limit_gib * GIB))
        self._lam, self._beta = _schedule(lam), None if beta is None else _schedule(beta)
        first_beta = None if self._beta is None else self._beta(0)
        self.set_sampler(MixtureSampler(capacity, self._lam(0), first_beta, max_draws_per_positive, stratified))
        self.set_writer(BlockWriter())
        self.set_rng(torch.Generator().manual_seed(seed))
        self.clips = None if clip_length is None else ClipStore(capacity, clip_length)
        consecutive = clip_length is not None or n_steps > 1 or hindsight is not None
        self._stamper = VLMScoreTransform(self.clips, keep, consecutive)
        self._n_step = NStepTransform(n_steps, gamma) if n_steps > 1 else None
        # Inverse transforms run last to first: stamp the raw rows, then n-step returns.
        if self._n_step is not None:
            self.append_transform(self._n_step)
        self.append_transform(self._stamper)
        self._own_transforms = len(self._transform)
        self._priorities = Priorities(capacity, terms, self._writer, self._sampler)
        self.score_reward, self.hindsight = score_reward, hindsight
        if score_reward is not None and self.clips is not None:
            score_reward.attach(self.clips, self._priorities.columns.arrays)
            self.append_transform(score_reward)
        if hindsight is not None:  # comes last: under another goal a row has the reward of that goal alone
            hindsight.attach(capacity, self._next_observation)
            self.append_transform(hindsight)
        thresholds = [term.threshold for term in terms if isinstance(term, VLMTerm)]
        thresholds += [] if score_reward is None else [score_reward.threshold]
        in_force = next((threshold for threshold in thresholds if threshold is not None), 0.5)
        self.monitor = SampleMonitor(self._priorities.columns.arrays, threshold=in_force)

    # Writing rows

    def extend(self, tensordicts: TensorDictBase, *, update_priority: bool | None = None) -> Tensor:
        """Stores a block of rows as a collector delivers it.

        Args:
            tensordicts: ``[n_envs, T]``, or ``[T]`` for one environment: T consecutive raw one-step rows of each, every
                block continuing where the last one ended and looking like the first one. Left unchanged.
            update_priority: not used; new rows get their priorities from the terms.

        Returns:
            ``int64[K]``, the slots written; with n-step returns they hold rows collected n − 1 vector steps earlier.

        Raises:
            ValueError: the block is empty, has another shape, lacks a key, has one of another shape or dtype, a stored
                value that is not finite, or rows that do not continue the ones before; nothing has changed.
        """
        if tensordicts.batch_dims == 1:
            tensordicts = tensordicts.unsqueeze(0)
        if tensordicts.batch_dims != 2:
            raise ValueError(f"expected rows of shape [n_envs, T] or [T], got {list(tensordicts.shape)}")
        num_envs, length = tensordicts.shape
        if not num_envs or not length:
            raise ValueError(f"a block of shape {[num_envs, length]} holds no rows")
        if num_envs * max(length, self.n_steps) > self.capacity:
            what = f"a block of {num_envs * length} rows"
            if self.n_steps > length:  # `end_streams` writes n − 1 rows of each environment at once
                what = f"n_steps={self.n_steps} rows of each of {num_envs} environments"
            raise ValueError(f"{what} does not fit into a buffer of capacity={self.capacity}")
        if tensordicts.device is not None and tensordicts.device.type != "cpu":
            tensordicts = tensordicts.to("cpu")  # rows, columns and trees live there
        rows = self._transform._inv_call(tensordicts)  # `inv` would copy first, which the stamping does anyway
        self.env_steps += tensordicts.numel()
        self._priorities.observe(tensordicts)
        if self.selector is not None:
            self.selector.observe(tensordicts)
        if rows is None:  # n-step returns hold back the first n − 1 rows of each environment
            return torch.zeros(0, dtype=torch.int64)
        return self._store(rows)

    def _store(self, rows: TensorDictBase) -> Tensor:
        """Writes stamped rows ``[n_envs, T]``, their columns, clips and priorities; returns the slots, ``int64[K]``."""
        shape = rows.shape
        stamp = rows.get(STAMP).numpy().reshape(-1, 4)
        if self._writer.table is None:
            rows = rows.exclude(STAMP)
            self._choose_storage(rows)
        slots = self._writer.extend(rows)
        index = slots.numpy()
        generation = self._writer.slot_generations[index]
        if self.hindsight is not None:
            self.hindsight.index.write(index.reshape(shape), rows["next", "done"].numpy().reshape(shape))
        if self.clips is not None:
            self.clips.release(index)
        known = self._priorities.values_of(rows) | {"episode_id": stamp[:, EPISODE], "env_step": self.env_steps}
        if self.clips is not None:
            known |= {"clip_id": self.clips.ids_at(stamp[:, ENTRY]), "position": stamp[:, POSITION]}
        self._priorities.fill(index, known)
        finished = self._stamper.commit(
            index.reshape(shape), generation.reshape(shape), stamp.reshape(*shape, -1), self.env_steps
        )
        self._priorities.refresh(self.env_steps, len(self._storage))
        self._priorities.compose(index, source="extend")
        if finished is not None:
            self.write_column("episode_success", *finished, source="end of episode")
        return slots

    def add(self, data: TensorDictBase) -> int:
        """Stores a row of a single environment; returns the slot written, or −1 while n-step returns hold it back."""
        slots = self.extend(data.unsqueeze(0))
        return int(slots[-1]) if len(slots) else -1

    def end_streams(self) -> Tensor:
        """Ends all running episodes here: call it before environments are reset out of turn, and after the last block.

        Open clips are cut and handed out, and the rows that n-step returns held back are stored as truncated ones.

        Returns:
            ``int64[K]``, the slots of rows held back until now.
        """
        slots = torch.zeros(0, dtype=torch.int64)
        streams = self._stamper.streams
        if streams is None:
            return slots
        streams.end(self.env_steps)
        self._priorities.end_streams()
        rows = None if self._n_step is None else self._n_step.flush()
        if rows is not None:
            slots = self._store(rows)
        if self.hindsight is not None:
            self.hindsight.index.end()
        streams.forget_episodes()
        return slots

    def change_streams(self) -> Tensor:
        """Ends all running episodes as `end_streams` does, and lets blocks of another number of environments follow."""
        slots = self.end_streams()
        self._stamper.forget_streams()
        return slots

    def _choose_storage(self, rows: TensorDictBase) -> None:
        """Replaces the storage by a memory-mapped one if that was asked for or the rows are too large."""
        storage = self._placement.mapped(self.capacity, rows)
        if storage is not None:
            self.set_storage(storage)
            self._writer.register_storage(storage)
            self.set_rng(self._rng)

    @property
    def columns(self) -> TensorDictBase:
        """Facts about rows, ``[capacity]`` (`columns.SPECS`): a live view to read; `write_column` writes late ones."""
        return self._priorities.columns.view

    @property
    def terms(self) -> list[PriorityTerm]:
        """The factors of the priority."""
        return self._priorities.terms

    @property
    def row_forms(self) -> Mapping[NestedKey, Form]:
        """Shape and dtype of each key of the rows accepted so far, snapshots included; empty before the first."""
        return self._stamper.reader.forms

    @property
    def score_threshold(self) -> float | None:
        """τ above which a clip counts as positive; ``None`` if scores are read as they are."""
        readers = [term for term in self.terms if isinstance(term, VLMTerm)]
        reader = readers[0] if readers else self.score_reward
        return None if reader is None else reader.threshold

    def set_env_steps(self, env_steps: int) -> None:
        """Moves the clock, and with it λ and β along their schedules."""
        self.env_steps = env_steps
        self._sampler.lam = self._lam(env_steps)
        if self._beta is not None:
            self._sampler.beta = self._beta(env_steps)

    def restart_clock(self) -> None:
        """Counts env steps from 0 again; the rows and clips there are, such as another run's, count as born then."""
        self.set_env_steps(0)
        self._priorities.restart_clock(len(self))
        if self.clips is not None:
            self.clips.restart_clock()

    # Late information: one checked method

    def write_column(
        self,
        name: str,
        index: ArrayLike | Tensor,
        generation: ArrayLike | Tensor,
        value: ArrayLike | Tensor,
        *,
        source: str,
    ) -> WriteResult:
        """Writes late information about rows, if they are still there, and re-composes their priorities.

        Args:
            name: the column.
            index: ``int64[K]``, slots; of a slot that occurs twice the last value counts.
            generation: ``int64[K]``, the slots' generations when the information was asked for; −1 is never alive.
            value: ``[K]``.
            source: who writes, for error messages.

        Returns:
            How many values were written, and how many dropped because their rows are gone.

        Raises:
            ValueError: the column cannot be written late, a shape, dtype or value is wrong, or a term makes no priority
                of it; nothing has changed.
        """
        return self._priorities.write(name, index, generation, value, source)

    def update_td_error(self, batch: TensorDictBase, abs_td_error: Tensor) -> WriteResult:
        """Writes back |δ| of a sampled batch.

        Args:
            batch: as `sample` returned it, on any device.
            abs_td_error: ``[B]`` or ``[B, 1]``, unweighted, ≥ 0.

        Returns:
            How many were written, and how many came too late.

        Raises:
            ValueError: a value is negative or not finite, or the shape is wrong.
        """
        value = abs_td_error.detach().reshape(-1).to("cpu", torch.float64)
        return self.write_column(
            "td_error", batch.get("index"), batch.get("index_generation"), value, source="update_td_error"
        )

    def write_reducible_loss(self, batch: TensorDictBase, reducible_loss: Tensor) -> WriteResult:
        """Writes back L(θ) − L(θ_target) of a sampled batch, ``[B]``, as `update_td_error` does |δ|."""
        value = reducible_loss.detach().reshape(-1).to("cpu", torch.float64)
        return self.write_column(
            "reducible_loss", batch.get("index"), batch.get("index_generation"), value, source="write_reducible_loss"
        )

    def write_scores(
        self,
        clip_ids: Sequence[int] | NDArray | Tensor,
        scores: ArrayLike | Tensor,
        source: str = "write_scores",
        *,
        guessed: bool = False,
    ) -> WriteResult:
        """Writes the scores of clips to all of their rows that still live.

        Args:
            clip_ids: B complete clips.
            scores: ``[B]``, in [0, 1].
            source: who scored them, for error messages.
            guessed: these are a student's guesses, until the scorer's own scores come.

        Returns:
            Counts of *clips*: written to at least one row, and stale ones without a living row.

        Raises:
            ValueError: a score is not finite or outside [0, 1], their number is wrong, or a clip was never handed out;
                nothing has changed.
        """
        return write_clip_scores(self, clip_ids, scores, source, guessed)

    def write_credit(self, clip_ids: Sequence[int], decisive: NDArray[np.bool_], source: str = "write_credit") -> None:
        """Says which transitions made clips positive; does nothing without a `CreditTerm`.

        Args:
            clip_ids: B complete clips; those not kept are passed over.
            decisive: ``bool[B, L − 1]``.
            source: who says so, for error messages.
        """
        write_clip_credit(self, clip_ids, decisive, source)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """TorchRL's name for `update_td_error`, with |δ| under ``td_error``."""
        self.update_td_error(data, data.get(self.priority_key))

    def update_priority(self, index: Any, priority: Any) -> None:
        """Refuses: a priority without a generation could hit another row."""
        raise TypeError(
            "priorities are composed from columns: use update_td_error(batch, abs_td_error) or write_column(…)"
        )

    # Sampling

    def sample(self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None) -> Any:
        """Draws a batch.

        Args:
            batch_size: ``None`` is the buffer's own.
            return_info: also return the dict of what was added.
            include_info: not used; the batch always carries it.

        Returns:
            ``[B]`` copies of rows with ``index`` and ``index_generation``, ``int64[B]``, and ``priority_weight``,
            ``float32[B]``, if β is set.

        Raises:
            RuntimeError: the buffer is empty.
            ValueError: ``batch_size`` is less than 1.
        """
        batch, info = self._sample(self._batch_size if batch_size is None else batch_size)
        return (batch, info) if return_info else batch

    def _sample(self, batch_size: int) -> tuple[TensorDictBase, dict[str, Tensor]]:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        table = self._writer.table
        if table is None:
            raise RuntimeError("cannot sample from an empty replay buffer")
        count = self._candidates(batch_size)
        choose = partial(self._choose, batch_size) if count > batch_size else None
        slots, info = self._sampler.sample_rows(self._writer.size, count, choose)
        index = slots.numpy()
        self.monitor.note(index, self.env_steps)
        info["index"] = slots
        info["index_generation"] = torch.from_numpy(self._writer.slot_generations[index])
        batch: TensorDictBase = table.read(slots, info)
        if len(self._transform) > self._own_transforms:  # ours do nothing on the way out
            batch = self._transform(batch)
        return batch, info

    def _next_observation(self, slots: Tensor) -> Tensor:
        """Returns copies of the next observations in slots ``int64[K]``, ``[K, …]``."""
        assert self._writer.table is not None
        return self._writer.table.values(NEXT, slots)

    def _candidates(self, batch_size: int) -> int:
        """Returns how many rows are drawn for a batch."""
        return batch_size if self.selector is None else self.selector.candidates(batch_size, self.env_steps)

    def _choose(self, batch_size: int, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the positions of a batch's rows among the slots drawn for it."""
        assert self.selector is not None
        assert self._writer.table is not None
        states = self._writer.table.values(STATE, torch.from_numpy(index))
        return self.selector.choose(states, batch_size, self._rng)

    # Reports

    def stats(self) -> dict[str, int | float | bool]:
        """Returns counters and gauges: TorchRL's (size, capacity, write_count, …) and ours.

        ``written/COLUMN`` and ``stale/COLUMN`` count checked writes; ``positives`` are rows with a positive priority.
        """
        return super().stats() | counters(self)

    @property
    def nbytes(self) -> int:
        """Bytes held by the rows written, all columns, the priority trees, the clips kept, and what hindsight needs."""
        return held_bytes(self)

    def replay_frequencies(self) -> dict[str, float]:
        """Returns how sampling treated each kind of row since the last call; see `SampleMonitor.report`.

        Without clips there is nothing to say of kinds that depend on scores.
        """
        return frequencies(self)

    def gauges(self) -> dict[str, float]:
        """Returns what shows the replay scheme at work, such as the share of rows that a mask keeps; O(N)."""
        return gauges(self)

    # Persistence

    def empty(self, empty_write_count: bool = True) -> None:
        """Forgets everything but the settings, the generator and the schedules' place."""
        super().empty(empty_write_count)
        self._priorities.end_streams()
        self._priorities.clear()
        if self.clips is not None:
            self.clips.clear()
        self._stamper.set_extra_state(None)
        if self._n_step is not None:
            self._n_step.set_extra_state(None)
        if self.hindsight is not None:
            self.hindsight.clear()
        self.monitor = SampleMonitor(self._priorities.columns.arrays, self.monitor.threshold)

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of everything that later draws depend on, as tensors and plain values (weights_only-safe)."""
        return buffer_state(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores `state_dict`; the next rows, draws and scores come out exactly as they would have.

        Raises:
            ValueError: another schema or other settings; nothing has changed.
        """
        load_buffer_state(self, state_dict)

    def dumps(self, path: str | Path) -> None:
        """Saves to the folder ``path``."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), path / "replay.pt")

    def loads(self, path: str | Path) -> None:
        """Loads from the folder ``path``; raises as `load_state_dict` does."""
        self.load_state_dict(torch.load(Path(path) / "replay.pt", weights_only=True))

    def __repr__(self) -> str:
        terms = ", ".join(map(repr, self.terms))
        return (
            f"VLMReplayBuffer(capacity={self.capacity}, size={len(self)}, terms=[{terms}], sampler={self._sampler!r})"
        )


def _schedule(value: float | LinearSchedule) -> LinearSchedule:
    return value if isinstance(value, LinearSchedule) else LinearSchedule(float(value), float(value))
