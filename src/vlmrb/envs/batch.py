"""The one TorchRL environment of this package.

A :class:`~vlmrb.envs.simulator.Simulator` knows a family's dynamics and speaks NumPy; :class:`SimulatorEnv` gives it
TorchRL's manners (specs, keys, partial resets). Families differ in their simulator alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Bounded, Categorical, Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase

from vlmrb.envs.simulator import Simulator


class SimulatorEnv(EnvBase):
    """TorchRL environment of batch size ``[n]`` around a simulator; keys as docs/architecture.md lists them.

    ``next`` holds the true last state at termination and truncation; ``step_and_maybe_reset`` begins new episodes and
    puts their first state at the root of the following tensordict.

    Args:
        simulator: the dynamics; already seeded.
        actions: numbers of the discrete actions that the agent may choose, counted anew from 0; ``None``: all.

    Raises:
        ValueError: ``actions`` names one that the simulator lacks, or its actions are continuous.
    """

    def __init__(self, simulator: Simulator, actions: Sequence[int] | None = None) -> None:
        n = simulator.num_envs
        super().__init__(device=torch.device("cpu"), batch_size=torch.Size([n]))
        self.simulator = simulator
        spaces = simulator.spaces
        if actions is not None and not (isinstance(spaces.action, int) and max(actions) < spaces.action):
            has = f"actions 0 to {spaces.action - 1}" if isinstance(spaces.action, int) else "continuous actions"
            raise ValueError(f"env.actions = {list(actions)} does not fit this environment, which has {has}")
        self._chosen = None if actions is None else np.array(actions, np.int64)

        def array(shape: tuple[int, ...], dtype: DTypeLike) -> TensorSpec:
            return Unbounded((n, *shape), dtype=torch.from_numpy(np.empty(0, dtype)).dtype)

        def flag() -> TensorSpec:
            return Binary(1, shape=(n, 1), dtype=torch.bool)

        observation = array(spaces.observation_shape, spaces.observation_dtype)
        if spaces.pixels:  # bounds tell an image from other bytes
            observation = Bounded(0, 255, shape=observation.shape, dtype=observation.dtype)
        self.observation_spec = Composite(
            observation=observation,
            snapshot=array((spaces.snapshot_size,), spaces.snapshot_dtype),
            success=flag(),
            shape=(n,),
        )
        self.action_spec = (
            Categorical(spaces.action if actions is None else len(actions), shape=(n,), dtype=torch.int64)
            if isinstance(spaces.action, int)
            else Bounded(*(torch.from_numpy(bound).expand(n, -1) for bound in spaces.action), dtype=torch.float32)
        )
        self.reward_spec = Unbounded((n, 1), dtype=torch.float32)
        self.done_spec = Composite(done=flag(), terminated=flag(), truncated=flag(), shape=(n,))

    @property
    def exact_resume(self) -> bool:
        """Whether ``load_state_dict`` continues every episode where it was; otherwise new ones begin."""
        return self.simulator.exact_resume

    def renumber(self, native: NDArray) -> NDArray:
        """Returns the simulator's own actions ``[n, …]`` as this environment counts them.

        Raises:
            ValueError: one of them is not among those that the agent may choose.
        """
        if self._chosen is None:
            return native
        match = native[:, None] == self._chosen
        if not match.any(axis=1).all():
            raise ValueError(f"env.actions = {self._chosen.tolist()} leaves out an action that is played here")
        return match.argmax(axis=1)

    def current(self) -> TensorDict:
        """Returns the root tensordict of the instances' present states, all flags false: where a collector goes on."""
        observation, snapshot = self.simulator.look()
        source = {"observation": torch.from_numpy(observation), "snapshot": torch.from_numpy(snapshot)}
        for key in ("success", "done", "terminated", "truncated"):
            source[key] = torch.zeros(self.simulator.num_envs, 1, dtype=torch.bool)
        return self._tensordict(source)

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDict:
        rows = np.arange(self.simulator.num_envs)
        if tensordict is not None and (mask := tensordict.get("_reset", None)) is not None:
            rows = rows[mask.numpy().reshape(-1)]
        self.simulator.restart(rows)
        return self.current()

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        action = tensordict.get("action").numpy()
        step = self.simulator.step(action if self._chosen is None else self._chosen[action])
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
        return self._tensordict(source)

    def _tensordict(self, source: dict[str, torch.Tensor]) -> TensorDict:
        """Wraps tensors that are known to be ``[n, …]`` and on the CPU.

        Not the public constructor: its checks of every entry cost as much as the dynamics. TorchRL does the same.
        """
        return TensorDict._new_unsafe(source, batch_size=self.batch_size, device=self.device)

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Steps, then begins new episodes where one ended; see ``EnvBase.step_and_maybe_reset``.

        Does what TorchRL's version does for one flat group of done flags, without looking up the specs each time: that
        took two thirds of a vector step (a test compares the two, key by key). What the policy and the collector wrote
        stays at the root in every row, until they write it anew. Partial steps are left to TorchRL.
        """
        if "_step" in tensordict or "next" in tensordict:
            return super().step_and_maybe_reset(tensordict)
        after = self._step(tensordict)
        ended = after.get("done").numpy()
        if ended.any():
            self.simulator.restart(np.flatnonzero(ended))
            fresh = dict(self.current().items())
        else:
            fresh = {key: value for key, value in after.items() if key != "reward"}
        root = self._tensordict({**dict(tensordict.items()), **fresh})
        tensordict.set("next", after)
        return tensordict, root

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.simulator.seed(seed)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns everything the instances' future depends on, as tensors, ints and strings (``weights_only``-safe)."""
        state = self.simulator.state_dict()
        return {key: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for key, v in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Restores ``state_dict``; go on from :meth:`current`.

        An empty state, which is what TorchRL's own collectors save for an environment, changes nothing.

        Raises:
            ValueError: the state belongs to other settings or to another version of this package.
        """
        if state_dict:
            state = {key: v.cpu().numpy() if isinstance(v, torch.Tensor) else v for key, v in state_dict.items()}
            self.simulator.load_state_dict(state)

    def close(self, *, raise_if_closed: bool = False) -> None:
        """Closes the simulator; a second call does nothing."""
        self.simulator.close()
        super().close(raise_if_closed=raise_if_closed)
