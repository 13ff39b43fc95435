"""The loop that every off-policy algorithm shares: collect, store, sample, update, write |δ| back.

Words used throughout: an *env step* is one transition of one environment instance; a *gradient step* is one optimizer
step on one batch; the *replay ratio* is gradient steps per env step.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning import LightningModule
from tensordict import TensorDictBase
from torch import Tensor, nn

from vlmrb.algorithms.collector import ReplayCollector
from vlmrb.envs import EnvConfig, make_env, make_renderer
from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.config import ReplayConfig, build_buffer
from vlmrb.replay.schedule import LinearSchedule

if TYPE_CHECKING:
    from vlmrb.scoring.clips import Renderer
    from vlmrb.scoring.service import ScoringService


def require_one_device(devices: int) -> None:
    """Refuses to train one agent on several devices.

    Raises:
        ValueError: ``devices`` is more than 1.
    """
    if devices > 1:
        raise ValueError(
            f"trainer.devices={devices}: one device trains one agent for now; use devices=1, and run several seeds "
            "side by side instead"
        )


@dataclass(frozen=True)
class TrainingConfig:
    """How long to train, and how much to learn from each env step.

    Attributes:
        total_env_steps: env steps in all, a multiple of ``frames_per_batch``.
        learning_starts: env steps before the first gradient step. Higher → a more varied first batch, a later start.
        frames_per_batch: env steps collected between two rounds of gradient steps, a multiple of ``env.num_envs``.
            Higher → less overhead per step, an older policy when acting.
        replay_ratio: gradient steps per env step; fractions carry over. Higher → more learning per env step, slower
            wall clock, more over-fitting to early experience.
        gamma: discount factor per env step.
        target_update_interval: gradient steps between two copies into the target network. Higher → steadier targets,
            slower propagation.
        epsilon_start: exploration rate at the start.
        epsilon_end: exploration rate after the decay.
        epsilon_fraction: part of ``total_env_steps`` over which ε falls linearly.
        compile: compile the loss with `torch.compile`; pays off only on long runs (it takes up to a minute).
    """

    total_env_steps: int = 240_000
    learning_starts: int = 2_048
    frames_per_batch: int = 320
    replay_ratio: float = 0.125
    gamma: float = 0.95
    target_update_interval: int = 200
    epsilon_start: float = 1.0
    epsilon_end: float = 0.1
    epsilon_fraction: float = 0.5
    compile: bool = False

    def __post_init__(self) -> None:
        """Refuses settings that cannot work, naming them."""
        for name in ("total_env_steps", "frames_per_batch", "target_update_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"training.{name}={getattr(self, name)} must be at least 1")
        for name in ("gamma", "epsilon_start", "epsilon_end", "epsilon_fraction"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"training.{name}={getattr(self, name)} must lie in [0, 1]")
        if self.total_env_steps % self.frames_per_batch:
            blocks = max(1, round(self.total_env_steps / self.frames_per_batch))
            raise ValueError(
                f"training.total_env_steps={self.total_env_steps} must be a multiple of "
                f"training.frames_per_batch={self.frames_per_batch}; the nearest is {blocks * self.frames_per_batch}"
            )
        if self.learning_starts < 0:
            raise ValueError(f"training.learning_starts={self.learning_starts} must not be negative")
        if self.replay_ratio <= 0:
            raise ValueError(f"training.replay_ratio={self.replay_ratio} must be positive")


class OffPolicyModule(LightningModule, ABC):
    """Base of all algorithms: owns environments, buffer and the training loop; subclasses own networks and losses.

    A subclass implements `build`, `update`, `configure_optimizers` and `act`; everything else is here, once.

    Args:
        env: which environment.
        training: budgets and schedules.
        replay: the replay scheme.
        seed: seeds environments, buffer and exploration.

    Attributes:
        env_steps: env steps collected so far.
        grad_steps: gradient steps taken so far.
        buffer: the replay buffer; there from `setup` on.
        scoring: the scoring service, hung here by the scoring callback; ``None`` when nothing is scored.
        resumed_without_replay: the checkpoint came without its replay side-car, so the buffer fills up again first.
    """

    buffer: VLMReplayBuffer
    renderer: Renderer

    def __init__(
        self,
        env: EnvConfig | None = None,
        training: TrainingConfig | None = None,
        replay: ReplayConfig | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.env = env or EnvConfig()
        self.training_config = training or TrainingConfig()
        self.replay = replay or ReplayConfig()
        self.seed = seed
        if self.replay.capacity < self.training_config.frames_per_batch:
            raise ValueError(
                f"replay.capacity={self.replay.capacity} is smaller than one block of "
                f"training.frames_per_batch={self.training_config.frames_per_batch} rows"
            )
        self.env_steps = 0
        self.grad_steps = 0
        self.scoring: ScoringService | None = None
        self.resumed_without_replay = False
        self._due = 0.0  # gradient steps owed, whole ones are taken and the remainder is carried over
        self._learning_from = self.training_config.learning_starts
        self._losses: list[Tensor] = []
        self._update_seconds = 0.0
        self._rng_to_restore: dict[str, Any] | None = None
        self._collector: ReplayCollector | None = None
        budget = self.training_config.total_env_steps
        self.epsilon_schedule = LinearSchedule(
            self.training_config.epsilon_start,
            self.training_config.epsilon_end,
            begin=0,
            duration=int(self.training_config.epsilon_fraction * budget),
        )
        self.exploration_generator = torch.Generator().manual_seed(seed + 2)

    # What a subclass supplies

    @abstractmethod
    def build(self, observation_spec: Any, action_spec: Any) -> None:
        """Creates networks and losses for one environment instance's specs (without batch dimension)."""

    @abstractmethod
    def update(self, batch: TensorDictBase) -> tuple[Mapping[str, Tensor], Tensor]:
        """Takes one gradient step.

        Args:
            batch: ``[B]`` rows on the module's device.

        Returns:
            Scalars to log (``loss`` among them, detached) and the unweighted |δ|, ``float32[B]``.
        """

    @abstractmethod
    def act(self, observation: Tensor, epsilon: float, generator: torch.Generator | None) -> Tensor:
        """Chooses actions.

        Args:
            observation: ``[n, …]`` on any device.
            epsilon: exploration rate in [0, 1].
            generator: where exploration draws from; a CPU generator.

        Returns:
            Actions ``[n, …]`` on the CPU.
        """

    # Set-up

    @property
    def needs_scores(self) -> bool:
        """Whether the replay scheme reads clip scores."""
        return self.replay.needs_scores

    def configure_model(self) -> None:
        """Builds networks for the environment's specs, once."""
        if hasattr(self, "_built"):
            return
        probe = make_env(self.env, num_envs=1, seed=0)
        self.build(probe.observation_spec["observation"][0], probe.action_spec[0])
        self._built = True
        probe.close()

    def setup(self, stage: str) -> None:
        """Builds the buffer and the renderer."""
        if stage != "fit" or hasattr(self, "buffer"):
            return
        require_one_device(self.trainer.world_size)
        self.renderer = make_renderer(self.env)
        self.buffer = build_buffer(
            self.replay,
            gamma=self.training_config.gamma,
            total_env_steps=self.training_config.total_env_steps,
            learning_starts=self.training_config.learning_starts,
            seed=self.seed + 1,
        )

    def train_dataloader(self) -> ReplayCollector:
        """Returns the collector: sized, so that Lightning reads nothing ahead, and stateful, so that it is saved."""
        self._collector = ReplayCollector(
            make_env(self.env, seed=self.seed),
            self._explore,
            frames_per_batch=self.training_config.frames_per_batch,
            total_frames=self.training_config.total_env_steps,
            policy_device=self.device,
        )
        return self._collector

    def transfer_batch_to_device(self, batch: TensorDictBase, device: torch.device, dataloader_idx: int) -> Any:
        """Leaves collected rows on the CPU, where the buffer lives."""
        return batch

    # The loop

    @property
    def epsilon(self) -> float:
        """The exploration rate now."""
        return self.epsilon_schedule(self.env_steps)

    def _explore(self, data: TensorDictBase) -> TensorDictBase:
        return data.set("action", self.act(data["observation"], self.epsilon, self.exploration_generator))

    def training_step(self, batch: TensorDictBase, batch_idx: int) -> None:
        """Stores what was collected, then learns: rows first, then scores, then samples."""
        self.env_steps += batch.numel()
        self.buffer.extend(batch)
        self.buffer.set_env_steps(self.env_steps)
        if self.scoring is not None:
            self.scoring.poll(self.env_steps)
        start = time.perf_counter()
        for _ in range(self._gradient_steps_due(batch.numel())):
            rows = self.buffer.sample()
            metrics, abs_td_error = self.update(rows.to(self.device) if self.device.type != "cpu" else rows)
            self.grad_steps += 1
            if self.replay.td is not None:
                self.buffer.update_td_error(rows, abs_td_error)
            self._losses.append(metrics["loss"])
            if self.grad_steps % self.training_config.target_update_interval == 0:
                self.update_targets()
        self._update_seconds += time.perf_counter() - start

    def _gradient_steps_due(self, new_env_steps: int) -> int:
        """Returns how many gradient steps to take now; the fraction is carried over (the replay ratio's remainder)."""
        if self.env_steps < self._learning_from or len(self.buffer) < self.replay.batch_size:
            return 0
        self._due += new_env_steps * self.training_config.replay_ratio
        whole = int(self._due + 1e-9)  # ten times 0.1 is a whole step, whatever floating point says
        self._due -= whole
        return whole

    def update_targets(self) -> None:
        """Copies the networks into their target networks."""
        for network, target in self.target_pairs():
            target.load_state_dict(network.state_dict())

    def target_pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        """Returns (network, target network) pairs; empty where an algorithm has none."""
        return []

    def take_losses(self) -> float:
        """Returns the mean loss since the last call (NaN if there was no gradient step)."""
        losses, self._losses = self._losses, []
        return float(torch.stack([loss.to(self.device) for loss in losses]).mean()) if losses else float("nan")

    # Persistence

    def init_args(self) -> dict[str, Any]:
        """Returns the constructor's arguments as plain containers, from which `load` builds the module again."""
        names = [name for name in inspect.signature(type(self).__init__).parameters if name != "self"]
        values = {name: self.training_config if name == "training" else getattr(self, name) for name in names}
        return {
            name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
            for name, value in values.items()
        }

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> OffPolicyModule:
        """Builds the module of a checkpoint with its weights, ready to act (``eval`` mode, CPU).

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is no checkpoint of this package, or of settings that this version does not know.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"checkpoint {path} does not exist")
        try:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
            state = checkpoint["vlmrb"]
            module_name, _, class_name = state["class_path"].rpartition(".")
            module_class = getattr(importlib.import_module(module_name), class_name)
            parser = ArgumentParser(exit_on_error=False)
            parser.add_class_arguments(module_class, "model")
            module = parser.instantiate_classes(parser.parse_object({"model": state["init_args"]})).model
        except (KeyError, EOFError, RuntimeError, pickle.UnpicklingError, ArgumentError) as error:
            raise ValueError(f"{path} is no checkpoint that this version of vlmrb can read: {error}") from error
        module.configure_model()
        module.load_state_dict(checkpoint["state_dict"])
        module.env_steps, module.grad_steps = state["env_steps"], state["grad_steps"]
        return module.eval()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds counters, random states and the constructor's arguments; plain types only (weights_only-safe)."""
        algorithm, keys, position, has_gauss, cached = np.random.get_state()
        checkpoint["vlmrb"] = {
            "class_path": f"{type(self).__module__}.{type(self).__qualname__}",
            "init_args": self.init_args(),
            "env_steps": self.env_steps,
            "grad_steps": self.grad_steps,
            "due": self._due,
            "learning_from": self._learning_from,
            "losses": torch.stack(self._losses).cpu() if self._losses else torch.zeros(0),
            "rng": {
                "torch": torch.get_rng_state(),
                "exploration": self.exploration_generator.get_state(),
                "numpy": [algorithm, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
                "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            },
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes counters back; random states follow when training starts, after all set-up has drawn from them.

        Raises:
            ValueError: these settings build other networks than the checkpoint holds.
        """
        own = {name: value.shape for name, value in self.state_dict().items()}
        saved = {name: value.shape for name, value in checkpoint["state_dict"].items()}
        if own != saved:
            differing = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
            raise ValueError(
                f"the checkpoint holds other networks than these settings build ({differing[0]} differs): resume with "
                "the env.id and the model settings that it was saved with"
            )
        state = checkpoint["vlmrb"]
        self.env_steps = state["env_steps"]
        self.grad_steps = state["grad_steps"]
        self._due = state["due"]
        self._learning_from = state["learning_from"]
        self._losses = list(state["losses"].unbind())
        self._rng_to_restore = state["rng"]

    def on_train_start(self) -> None:
        """Restores random states on resume; without a replay side-car the buffer fills up first, instead of a burst."""
        if self.env_steps and self._collector is not None and not self._collector.env.exact_resume:
            self.buffer.end_streams()  # the environments could not go on where they were: new episodes begin
        if self.env_steps and not len(self.buffer):
            self.resumed_without_replay = True
            self._due = 0.0
            self._learning_from = self.env_steps + max(self.training_config.learning_starts, self.replay.batch_size)
        if self._rng_to_restore is not None:
            rng, self._rng_to_restore = self._rng_to_restore, None
            torch.set_rng_state(rng["torch"])
            self.exploration_generator.set_state(rng["exploration"])
            algorithm, keys, position, has_gauss, cached = rng["numpy"]
            np.random.set_state((algorithm, keys.numpy().astype(np.uint32), position, has_gauss, cached))
            if rng["cuda"] and torch.cuda.is_available():
                torch.cuda.set_rng_state_all(rng["cuda"])
