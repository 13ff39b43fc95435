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
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning import LightningModule
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import TensorSpec

from vlmrb.algorithms.collector import ReplayCollector
from vlmrb.algorithms.config import TrainingConfig, require_fitting
from vlmrb.algorithms.random_states import random_states, restore_random_states
from vlmrb.envs import EnvConfig, make_env, make_goals, make_renderer
from vlmrb.envs.actions import uniform_actions
from vlmrb.networks.pixels import is_image
from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.build import build_buffer
from vlmrb.replay.config import ReplayConfig
from vlmrb.settings import refuse_moved

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


class OffPolicyModule(LightningModule, ABC):
    """Base of all algorithms: owns environments, buffer and the training loop; subclasses own networks and losses.

    A subclass implements `build`, `configure_optimizers`, `update`, `act`, `explore` and `state_value`; everything else
    is here, once.

    Args:
        env: which environment.
        training: budgets and schedules.
        replay: the replay scheme.
        seed: seeds environments, buffer and exploration.

    Attributes:
        env_steps: env steps collected so far.
        grad_steps: gradient steps taken so far, the one under way included.
        action_spec: of one instance's action; there once the networks are built.
        observes_pixels: whether the agent sees images; likewise.
        buffer: the replay buffer; there from `setup` on.
        goals: what exchanges the environment's goals; ``None`` without hindsight.
        scoring: the scoring service, hung here by the scoring callback; ``None`` when nothing is scored.
        stop_requested: whether a signal asked the run to stop; set by `ReplayCheckpoint`, which catches signals.
        resumed_without_replay: the checkpoint came without its replay side-car, so the buffer fills up again first.
    """

    evaluation_epsilon: ClassVar[float] = 0.0
    """Share of uniformly random actions in evaluations, where nothing else is asked for."""

    action_spec: TensorSpec
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
        require_fitting(self.training_config, self.replay, self.env.num_envs)
        self.goals = None if self.replay.her is None else make_goals(self.env)
        if self.replay.relo is not None and type(self).reducible_loss is OffPolicyModule.reducible_loss:
            raise ValueError(
                f"replay.relo needs an algorithm that tells its reducible_loss, and {type(self).__name__} does not: "
                "implement it, or set replay.relo to null"
            )
        self._compares_features = self.replay.aer is not None and self.replay.aer.similarity == "features"
        if self._compares_features and type(self).features is OffPolicyModule.features:
            raise ValueError(
                "replay.aer.similarity=features needs an algorithm that tells its features, and "
                f"{type(self).__name__} does not: implement it, or set replay.aer.similarity to cosine"
            )
        self.env_steps = 0
        self.grad_steps = 0
        self.scoring: ScoringService | None = None
        self.stop_requested: Callable[[], bool] = lambda: False
        self.resumed_without_replay = False
        self._due = 0.0  # gradient steps owed, whole ones are taken and the remainder is carried over
        self._learning_from = self.training_config.learning_starts
        self._metrics: dict[str, list[Tensor]] = {}  # scalars that `update` returned since the last `take_metrics`
        self._update_seconds = 0.0
        self._rng_to_restore: dict[str, Any] | None = None
        self._collector: ReplayCollector | None = None
        self.exploration_generator = torch.Generator().manual_seed(seed + 2)

    # What a subclass supplies

    @abstractmethod
    def build(self, observation_spec: Any, action_spec: Any) -> None:
        """Creates networks and losses for one environment instance's specs (without batch dimension)."""

    @abstractmethod
    def update(self, batch: TensorDictBase) -> tuple[Mapping[str, Tensor], Tensor]:
        """Takes one gradient step, target networks included; ``grad_steps`` already counts it.

        Args:
            batch: ``[B]`` rows on the module's device.

        Returns:
            Scalars to log (``loss`` among them, detached) and the unweighted |δ|, ``float32[B]``.
        """

    @abstractmethod
    def act(self, observation: Tensor) -> Tensor:
        """Chooses the actions that the policy deems best; nothing is left to chance.

        Args:
            observation: ``[n, …]`` on any device.

        Returns:
            Actions ``[n, …]`` on the CPU.
        """

    @abstractmethod
    def explore(self, observation: Tensor, generator: torch.Generator) -> Tensor:
        """Chooses actions as training does; arguments and result as for `play`."""

    @abstractmethod
    def state_value(self, observation: Tensor) -> Tensor:
        """Returns what the critic expects of ``[n, …]`` states if the agent acts its best: ``float32[n]``."""

    def reducible_loss(self, batch: TensorDictBase) -> Tensor:
        """Returns L(θ) − L(θ_target) of ``[B]`` rows on one regression target, ``float32[B]``.

        Only ``replay.relo`` asks for it, so an algorithm can do without.
        """
        raise TypeError(f"{type(self).__name__} does not tell its reducible loss")

    def features(self, observation: Tensor) -> Tensor:
        """Returns what the network makes of ``[n, …]`` observations on the module's device, ``float32[n, F]``.

        Only ``replay.aer.similarity=features`` asks for it, so an algorithm can do without.
        """
        raise TypeError(f"{type(self).__name__} does not tell its features")

    def gauges(self) -> dict[str, float]:
        """Returns numbers about the agent at present, logged as ``train/NAME``."""
        return {}

    def generators(self) -> dict[str, torch.Generator]:
        """Returns the random generators of this run by name; checkpoints keep their states."""
        return {"exploration": self.exploration_generator}

    # Acting

    @torch.no_grad()
    def play(self, observation: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
        """Acts, but for a share of uniformly random actions: how evaluations and corpora are played.

        Args:
            observation: ``[n, …]`` on any device.
            epsilon: probability of a random action, for each instance by itself, in [0, 1].
            generator: where chance draws from; a CPU generator.

        Returns:
            Actions ``[n, …]`` on the CPU.
        """
        action = self.act(observation)
        if epsilon <= 0.0:
            return action
        random = self.random_actions(len(action), generator)
        chance = torch.rand(len(action), generator=generator) < epsilon
        return torch.where(chance.reshape(-1, *[1] * (action.ndim - 1)), random, action)

    def random_actions(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws ``count`` actions uniformly, ``[n, …]`` on the CPU."""
        return uniform_actions(self.action_spec, count, generator)

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
        self.action_spec = probe.action_spec[0]
        observation_spec = probe.observation_spec["observation"][0]
        self.observes_pixels = is_image(observation_spec)
        self.build(observation_spec, self.action_spec)
        self._built = True
        probe.close()

    def setup(self, stage: str) -> None:
        """Builds the buffer and the renderer."""
        if stage != "fit" or hasattr(self, "buffer"):
            return
        require_one_device(self.trainer.world_size)
        self.renderer = make_renderer(self.env)
        self.replay.require_for(self.env.id)
        self.buffer = build_buffer(
            self.replay,
            gamma=self.training_config.gamma,
            total_env_steps=self.training_config.total_env_steps,
            learning_starts=self.training_config.learning_starts,
            seed=self.seed + 1,
            goals=self.goals,
        )
        if self._compares_features and self.buffer.selector is not None:
            self.buffer.selector.features = self._features_on_cpu

    @torch.no_grad()
    def _features_on_cpu(self, observation: Tensor) -> Tensor:
        return self.features(observation.to(self.device)).float().cpu()

    def train_dataloader(self) -> ReplayCollector:
        """Returns the collector: sized, so that Lightning reads nothing ahead, and stateful, so that it is saved."""
        self._collector = ReplayCollector(
            make_env(self.env, seed=self.seed),
            self._choose_actions,
            frames_per_batch=self.training_config.frames_per_batch,
            total_frames=self.training_config.total_env_steps,
            policy_device=self.device,
        )
        return self._collector

    def transfer_batch_to_device(self, batch: TensorDictBase, device: torch.device, dataloader_idx: int) -> Any:
        """Leaves collected rows on the CPU, where the buffer lives."""
        return batch

    # The loop

    def _choose_actions(self, data: TensorDictBase) -> TensorDictBase:
        return data.set("action", self.explore(data["observation"], self.exploration_generator))

    def training_step(self, batch: TensorDictBase, batch_idx: int) -> None:
        """Stores what was collected, then learns: rows first, then scores, then samples."""
        self.env_steps += batch.numel()
        self.buffer.extend(batch)
        self.buffer.set_env_steps(self.env_steps)
        if self.scoring is not None:
            self.scoring.poll(self.env_steps)
            self.scoring.keep_up(self.stop_requested)
        start = time.perf_counter()
        for _ in range(self._gradient_steps_due(batch.numel())):
            rows = self.buffer.sample()
            self.grad_steps += 1
            on_device = rows.to(self.device) if self.device.type != "cpu" else rows
            if self.replay.relo is not None:
                self.buffer.write_reducible_loss(rows, self.reducible_loss(on_device))
            metrics, abs_td_error = self.update(on_device)
            if self.replay.needs_td_errors:
                self.buffer.update_td_error(rows, abs_td_error)
            for name, value in metrics.items():
                self._metrics.setdefault(name, []).append(value)
        self._update_seconds += time.perf_counter() - start

    def _gradient_steps_due(self, new_env_steps: int) -> int:
        """Returns how many gradient steps to take now; the fraction is carried over (the replay ratio's remainder)."""
        if self.env_steps < self._learning_from or len(self.buffer) < self.replay.batch_size:
            return 0
        self._due += new_env_steps * self.training_config.replay_ratio
        whole = int(self._due + 1e-9)  # ten times 0.1 is a whole step, whatever floating point says
        self._due -= whole
        return whole

    def take_metrics(self) -> dict[str, float]:
        """Returns the mean of each scalar of `update` since the last call; empty if there was no gradient step."""
        metrics, self._metrics = self._metrics, {}
        return {
            name: float(torch.stack([value.to(self.device) for value in values]).mean())
            for name, values in metrics.items()
        }

    # Persistence

    @property
    def exact_resume(self) -> bool:
        """Whether the environments can go on where a checkpoint left them; otherwise new episodes begin."""
        return self._collector is None or self._collector.env.exact_resume

    def init_args(self) -> dict[str, Any]:
        """Returns the constructor's arguments as plain containers, those handed on to its base class included."""
        names: dict[str, None] = {}
        for class_ in type(self).__mro__:
            parameters = inspect.signature(class_.__init__).parameters  # type: ignore[misc]
            names |= dict.fromkeys(name for name, found in parameters.items() if found.kind is not found.VAR_KEYWORD)
            if not any(found.kind is found.VAR_KEYWORD for found in parameters.values()):
                break
        del names["self"]
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
            refuse_moved({f"training.{name}" for name in state["init_args"]["training"]}, str(path))
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

    def _class_path(self) -> str:
        return f"{type(self).__module__}.{type(self).__qualname__}"

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds counters, random states and the constructor's arguments; plain types only (weights_only-safe)."""
        checkpoint["vlmrb"] = {
            "class_path": self._class_path(),
            "init_args": self.init_args(),
            "env_steps": self.env_steps,
            "grad_steps": self.grad_steps,
            "due": self._due,
            "learning_from": self._learning_from,
            "metrics": {name: torch.stack(values).cpu() for name, values in self._metrics.items()},
            "rng": random_states(self.generators()),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes counters back; random states follow when training starts, after all set-up has drawn from them.

        Raises:
            ValueError: the checkpoint is another algorithm's, or these settings build other networks than it holds.
        """
        state = checkpoint["vlmrb"]
        if state["class_path"] != self._class_path():
            raise ValueError(
                f"the checkpoint is of model {state['class_path']}, and these settings train {self._class_path()}: "
                f"resume with --model {state['class_path']}"
            )
        refuse_moved({f"training.{name}" for name in state["init_args"]["training"]}, "the checkpoint")
        own = {name: value.shape for name, value in self.state_dict().items()}
        saved = {name: value.shape for name, value in checkpoint["state_dict"].items()}
        if own != saved:
            differing = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
            raise ValueError(
                f"the checkpoint holds other networks than these settings build ({differing[0]} differs): resume with "
                "the env.id and the model settings that it was saved with"
            )
        self.env_steps = state["env_steps"]
        self.grad_steps = state["grad_steps"]
        self._due = state["due"]
        self._learning_from = state["learning_from"]
        self._metrics = {name: list(values.unbind()) for name, values in state["metrics"].items()}
        self._rng_to_restore = state["rng"]

    def on_train_start(self) -> None:
        """Restores random states on resume; without a replay side-car the buffer fills up first, instead of a burst."""
        if self.env_steps and not self.exact_resume:
            self.buffer.end_streams()  # the environments could not go on where they were: new episodes begin
        if self.env_steps and not len(self.buffer):
            self.resumed_without_replay = True
            self.buffer.set_env_steps(self.env_steps)  # rows are as old as they are by the run's clock, not a new one
            self._due = 0.0
            self._learning_from = self.env_steps + max(self.training_config.learning_starts, self.replay.batch_size)
        if self._rng_to_restore is not None:
            restore_random_states(self._rng_to_restore, self.generators())
            self._rng_to_restore = None
