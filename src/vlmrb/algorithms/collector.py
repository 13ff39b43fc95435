"""The collector that is the train dataloader, with a state that resumes exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors import Collector

from vlmrb.envs.batch import SimulatorEnv


class ReplayCollector(Collector):
    """A TorchRL collector on one batched environment, yielding ``[num_envs, T]`` one-step rows.

    The stock state of a batched environment is empty: loading it starts fresh episodes. This one holds the
    environment's own state, the current observation and the number of frames, so that a resumed run takes the very
    steps that the interrupted one would have taken, as far as the environment can be restored (``env.state_dict()``).

    Args:
        env: a batched environment, ``batch_size [num_envs]``.
        policy: fills in ``action``.
        frames_per_batch: env steps per yielded batch, a multiple of ``num_envs``.
        total_frames: env steps in all.
        policy_device: where the policy lives; environments and collected rows stay on the CPU.

    Raises:
        ValueError: ``frames_per_batch`` is no multiple of the number of environments.
    """

    _last_env_state: dict[str, Any] | None = None  # when all frames have been collected

    def __init__(
        self,
        env: SimulatorEnv,
        policy: Callable[[TensorDictBase], TensorDictBase],
        *,
        frames_per_batch: int,
        total_frames: int,
        policy_device: torch.device | str = "cpu",
    ) -> None:
        num_envs = env.batch_size.numel()
        if frames_per_batch % num_envs:
            raise ValueError(
                f"training.frames_per_batch={frames_per_batch} must be a multiple of env.num_envs={num_envs}"
            )
        on_cpu = torch.device(policy_device).type == "cpu"  # one device is cheaper than three equal ones
        devices = (
            {"device": "cpu"}
            if on_cpu
            else {"policy_device": policy_device, "env_device": "cpu", "storing_device": "cpu"}
        )
        super().__init__(
            env,
            policy,
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            track_traj_ids=False,
            trust_policy=True,
            return_same_td=True,  # the buffer copies every batch before the next one is collected
            **devices,
        )

    @property
    def frames(self) -> int:
        """Env steps collected so far."""
        return self._frames

    def _increment_frames(self, numel: int) -> bool:
        """Counts frames; TorchRL closes the environment with the last of them, before a checkpoint can be saved."""
        if self._frames + numel >= self.total_frames:
            self._last_env_state = self.env.state_dict()
        return super()._increment_frames(numel)

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of frames and the environment's state as plain containers of tensors and numbers."""
        if self.closed:
            return {}
        env = self.env.state_dict() if self._last_env_state is None else self._last_env_state
        return {"frames": self._frames, "iter": self._iter, "env": env}

    def load_state_dict(self, state_dict: dict[str, Any], **_: Any) -> None:
        """Continues where `state_dict` was taken."""
        if not state_dict:
            return
        self._frames = state_dict["frames"]
        self._iter = state_dict["iter"]
        self.env.load_state_dict(state_dict["env"])
        self._carrier.update(self.env.current())
