"""A student: learns from the scorer's answers, on what the agent observes, and guesses the answers to other clips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from vlmrb.scoring.student.memory import MEMORY_MB, AnsweredClips
from vlmrb.scoring.student.networks import PartNetwork, make_network
from vlmrb.scoring.student.parts import Kind, Parts, make_parts_maker, together

NOTHING = -8.0  # logit of a transition in which nothing changes, and of a clip of such


@dataclass(frozen=True)
class Guess:
    """What a student makes of B clips of L frames.

    Attributes:
        clips: ``float32[B]``, logits that the scorer says yes, as if every second clip were a positive one.
        transitions: ``float32[B, L − 1]``, how much each transition speaks for it; a clip's logit is their maximum.
    """

    clips: NDArray[np.float32]
    transitions: NDArray[np.float32]


class Student:
    """Multiple-instance learning: a clip is as positive as the most positive of its transitions.

    Trained on half positives, half negatives, however rare positives are.

    Args:
        kind: of observations.
        threshold: τ above which an answer is a yes.
        soft: learn the scores themselves instead of yes and no.
        learning_rate: of Adam. Higher → learns from fewer answers, forgets sooner.
        batch_clips: clips in a training step.
        memory_clips: most answered clips of each kind that it keeps.
        memory_mb: most MiB of each kind.
        seed: of its weights and draws.
    """

    def __init__(
        self,
        kind: Kind,
        threshold: float = 0.5,
        soft: bool = False,
        learning_rate: float = 1e-2,
        batch_clips: int = 64,
        memory_clips: int = 2048,
        memory_mb: int = MEMORY_MB,
        seed: int = 0,
    ) -> None:
        self.kind = kind
        self.memory = AnsweredClips(memory_clips, memory_mb << 20)
        self.steps = 0
        self.loss = float("nan")
        self._threshold = np.float32(threshold)
        self._soft = soft
        self._learning_rate = learning_rate
        self._batch_clips = batch_clips
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._maker = make_parts_maker(kind)
        self._shape: list[int] = []  # of an input
        self._network: PartNetwork | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    def remember(self, observations: NDArray, scores: NDArray[np.float32], again: bool = False) -> None:
        """Is told answers.

        Args:
            observations: ``[B, L, …]``, as the agent saw the clips.
            scores: ``float32[B]``, what the scorer said.
            again: it has seen them before, in another life: only its memory is filled.
        """
        parts = self._maker.parts(observations)
        network = self._network_for(parts.inputs.shape[1:])
        if len(parts.inputs) and not again:
            network.see(torch.from_numpy(parts.inputs))
        positive = scores > self._threshold
        targets = scores if self._soft else positive.astype(np.float32)
        for one, target, yes in zip(parts.of_clips(len(scores)), targets.tolist(), positive.tolist(), strict=True):
            self.memory.add(one, target, yes)

    def learn(self, steps: int) -> None:
        """Takes training steps; does nothing before it has been told both a yes and a no."""
        if not self.memory.both or self._network is None or self._optimizer is None:
            return
        for _ in range(steps):
            drawn, targets = self.memory.draw(self._batch_clips, self._rng)
            parts = together(drawn)
            if not len(parts.which):  # nothing changes in any of them, so there is nothing to judge
                continue
            logits = self._transitions(parts, len(drawn)).amax(1)
            loss = binary_cross_entropy_with_logits(logits, torch.tensor(targets))
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            self.steps += 1
            self.loss = loss.item()

    @torch.no_grad()
    def guess(self, observations: NDArray) -> Guess:
        """Foresees answers.

        Args:
            observations: ``[B, L, …]``.
        """
        parts = self._maker.parts(observations)
        self._network_for(parts.inputs.shape[1:])
        transitions = self._transitions(parts, len(observations), observations.shape[1] - 1)
        return Guess(transitions.amax(1).numpy(), transitions.numpy())

    def _transitions(self, parts: Parts, clips: int, steps: int | None = None) -> Tensor:
        """Returns logits ``float32[clips, steps]``: of each transition's strongest part."""
        assert self._network is not None
        if steps is None:
            steps = int(parts.step.max(initial=0)) + 1
        found = torch.full((clips * steps,), NOTHING)
        if len(parts.which):
            logits = self._network(torch.from_numpy(parts.inputs))[torch.from_numpy(parts.which)]
            place = torch.from_numpy(parts.clip * steps + parts.step)
            found = found.scatter_reduce(0, place, logits, "amax")
        return found.reshape(clips, steps)

    def _network_for(self, shape: Sequence[int]) -> PartNetwork:
        if self._network is None:
            with torch.random.fork_rng():
                torch.manual_seed(self._seed)
                self._network = make_network(self.kind, shape)
            self._shape = list(shape)
            self._optimizer = torch.optim.Adam(self._network.parameters(), self._learning_rate)
        return self._network

    def state_dict(self) -> dict[str, Any]:
        """Returns what it has learned: weights, what inputs are standardised by, the optimizer's moments, its draws.

        Its memory is left out. That may be hundreds of MiB, which would have to leave the student's process again and
        again, as nobody knows when a checkpoint will be saved; and a checkpoint holds these clips and the scorer's
        answers already, except for the oldest, which the replay buffer has let go of.
        """
        assert self._network is not None
        assert self._optimizer is not None
        return {
            "shape": self._shape,
            "network": self._network.state_dict(),
            "optimizer": self._optimizer.state_dict()["state"],
            "draws": self._rng.bit_generator.state,
            "steps": self.steps,
            "loss": self.loss,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up what had been learned, in the place of what it has learned; the learning rate stays its own.

        Args:
            state: as `state_dict` returned it, of a student for the same kind of observations.
        """
        self._network = None
        self._network_for(state["shape"]).load_state_dict(state["network"])
        assert self._optimizer is not None
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
        self._rng.bit_generator.state = state["draws"]
        self.steps, self.loss = state["steps"], state["loss"]
