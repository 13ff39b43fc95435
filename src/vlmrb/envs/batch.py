"""The one TorchRL environment of this package: a batch of instances behind arrays.

A :class:`Simulator` knows a family's dynamics and speaks NumPy; :class:`SimulatorEnv` gives it TorchRL's manners (specs,
keys, partial resets). Families differ in their simulator alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Bounded, Categorical, Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase


@dataclass(frozen=True)
class Spaces:
    """Shapes and types of one instance.

    Attributes:
        observation_shape: of one observation.
        observation_dtype: its NumPy type.
        snapshot_size: S, elements of one snapshot.
        action: number of discrete actions, or ``(low, high)`` of a continuous one, each ``float32[A]``.
        snapshot_dtype: NumPy type of a snapshot.
    """

    observation_shape: tuple[int, ...]
    observation_dtype: DTypeLike
    snapshot_size: int
    action: int | tuple[NDArray[np.float32], NDArray[np.float32]]
    snapshot_dtype: DTypeLike = np.uint8


class Step(NamedTuple):
    """What a step of all instances leads to: the true states after it, before any reset. Arrays are the caller's.

    Attributes:
        observation: ``[n, *observation_shape]``.
        snapshot: ``[n, S]``.
        reward: ``float32[n]``.
        success: ``bool[n]``, the goal was reached by this very step.
        terminated: ``bool[n]``, the episode ended in a terminal state.
        truncated: ``bool[n]``, the episode ran into its horizon; may hold together with ``terminated``.
    """

    observation: NDArray
    snapshot: NDArray
    reward: NDArray[np.float32]
    success: NDArray[np.bool_]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]


class Simulator(Protocol):
    """Dynamics of ``num_envs`` instances. Never resets by itself.

    Attributes:
        num_envs: n.
        spaces: of one instance.
        exact_resume: whether ``load_state_dict`` continues every episode where it was; otherwise it starts new ones.
    """

    num_envs: int
    spaces: Spaces
    exact_resume: bool

    def step(self, action: NDArray) -> Step:
        """Moves every instance on; ``action`` is ``int64[n]`` or ``float32[n, A]``."""
        ...

    def restart(self, rows: NDArray[np.int64]) -> None:
        """Begins new episodes in the given instances, ``int64[k]``."""
        ...

    def look(self) -> tuple[NDArray, NDArray]:
        """Returns fresh arrays of the current observations ``[n, …]`` and snapshots ``[n, S]``."""
        ...

    def seed(self, seed: int) -> None:
        """Seeds the generator of levels to come."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as tensors, ints and strings."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        ...

    def close(self) -> None:
        """Lets go of windows, files and processes; a second call does nothing."""
        ...


class SimulatorEnv(EnvBase):
    """TorchRL environment of batch size ``[n]`` around a simulator; keys as docs/architecture.md lists them.

    ``next`` holds the true last state at termination and truncation; ``step_and_maybe_reset`` begins new episodes and
    puts their first state at the root of the following tensordict.

    Args:
        simulator: the dynamics; already seeded.
    """

    def __init__(self, simulator: Simulator) -> None:
        n = simulator.num_envs
        super().__init__(device=torch.device("cpu"), batch_size=torch.Size([n]))
        self.simulator = simulator
        spaces = simulator.spaces

        def array(shape: tuple[int, ...], dtype: DTypeLike) -> TensorSpec:
            return Unbounded((n, *shape), dtype=torch.from_numpy(np.empty(0, dtype)).dtype)

        def flag() -> TensorSpec:
            return Binary(1, shape=(n, 1), dtype=torch.bool)

        self.observation_spec = Composite(
            observation=array(spaces.observation_shape, spaces.observation_dtype),
            snapshot=array((spaces.snapshot_size,), spaces.snapshot_dtype),
            success=flag(),
            shape=(n,),
        )
        self.action_spec = (
            Categorical(spaces.action, shape=(n,), dtype=torch.int64)
            if isinstance(spaces.action, int)
            else Bounded(*(torch.from_numpy(bound).expand(n, -1) for bound in spaces.action), dtype=torch.float32)
        )
        self.reward_spec = Unbounded((n, 1), dtype=torch.float32)
        self.done_spec = Composite(done=flag(), terminated=flag(), truncated=flag(), shape=(n,))

    @property
    def exact_resume(self) -> bool:
        """Whether ``load_state_dict`` continues every episode where it was; otherwise new ones begin."""
        return self.simulator.exact_resume

    def current(self) -> TensorDict:
        """Returns the root tensordict of the states the instances are in, all flags false: where a collector goes on."""
        observation, snapshot = self.simulator.look()
        source = {"observation": torch.from_numpy(observation), "snapshot": torch.from_numpy(snapshot)}
        for key in ("success", "done", "terminated", "truncated"):
            source[key] = torch.zeros(self.simulator.num_envs, 1, dtype=torch.bool)
        return TensorDict(source, self.batch_size, device=self.device)

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDict:
        rows = np.arange(self.simulator.num_envs)
        if tensordict is not None and (mask := tensordict.get("_reset", None)) is not None:
            rows = rows[mask.numpy().reshape(-1)]
        self.simulator.restart(rows)
        return self.current()

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        step = self.simulator.step(tensordict.get("action").numpy())
        done = step.terminated | step.truncated
        source = {
            "observation": torch.from_numpy(step.observation),
            "snapshot": torch.from_numpy(step.snapshot),
            "success": torch.from_numpy(step.success[:, None]),
            "reward": torch.from_numpy(step.reward[:, None]),
            "done": torch.from_numpy(done[:, None]),
            "terminated": torch.from_numpy(step.terminated[:, None]),
            "truncated": torch.from_numpy(step.truncated[:, None]),
        }
        return TensorDict(source, self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.simulator.seed(seed)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns everything the instances' future depends on, as tensors, ints and strings (``weights_only``-safe)."""
        return self.simulator.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Restores ``state_dict``; go on from :meth:`current`. An empty one, as TorchRL's collectors save, does nothing.

        Raises:
            ValueError: the state belongs to other settings or to another version of this package.
        """
        if state_dict:
            self.simulator.load_state_dict(state_dict)

    def close(self, *, raise_if_closed: bool = False) -> None:
        """Closes the simulator; a second call does nothing."""
        self.simulator.close()
        super().close(raise_if_closed=raise_if_closed)
