"""Control experiments: scores spoiled in a known way on their way into the buffer (method, section 9).

A control changes answers in the order in which they arrive and on the learner's side. So the cache keeps clean
scores, and a control's state travels in the checkpoint. All controls treat the answers as a stream: how it is cut
into batches changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Shuffled:
    """Gives a clip the score of a random clip among the last ``memory``, itself included.

    The scores keep their distribution, drift with training included, but say nothing about the clips they land on.
    If a scheme still learns as fast, its gain does not come from the scorer's judgement.

    Args:
        memory: how many of the latest scores to draw from, at least 2. Higher → the score is less tied to when the
            clip was made, but lags further behind the policy.
        seed: of the control's own generator; ``None`` follows the run's, and is 0 without one.

    Raises:
        ValueError: ``memory`` is below 2, with which the scores would stay where they are.
    """

    name = "shuffled"

    def __init__(self, memory: int = 1000, seed: int | None = None) -> None:
        if memory < 2:
            raise ValueError(f"a shuffling control needs a memory of at least 2 scores, got {memory}")
        self.memory = memory
        self._recent: deque[float] = deque(maxlen=memory)
        self._own_seed = seed
        self._rng = np.random.default_rng(seed or 0)

    def follow(self, seed: int) -> None:
        """Draws by the run's seed, unless it has its own."""
        if self._own_seed is None:
            self._rng = np.random.default_rng(seed)

    def apply(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Exchanges the next scores of the stream.

        Args:
            scores: ``float32[B]`` in [0, 1], in order of arrival.

        Returns:
            ``float32[B]``, each the score of one of the last ``memory`` clips.
        """
        shuffled = np.empty_like(scores)
        # One uniform number a clip, not one bounded integer: the generator's position then depends on the count of
        # clips alone.
        for row, (score, draw) in enumerate(zip(scores.tolist(), self._rng.random(len(scores)).tolist(), strict=True)):
            self._recent.append(score)
            shuffled[row] = self._recent[int(draw * len(self._recent))]
        return shuffled

    def stats(self) -> dict[str, float]:
        """Returns ``remembered``, the number of scores drawn from at present."""
        return {"remembered": float(len(self._recent))}

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that decides future answers, as plain lists, numbers and strings."""
        return {"recent": list(self._recent), "rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where ``state`` was taken."""
        self._recent = deque(state["recent"], maxlen=self.memory)
        self._rng.bit_generator.state = state["rng"]


class Corrupted:
    """Demotes each positive clip with probability ``kappa`` and promotes later negatives in its place.

    Precision falls to about ``1 − kappa`` while the number of positives holds, so what is measured is the price of
    wrong labels and not that of fewer. The scores themselves change places: a demoted clip gets the score of the
    latest negative (0 before there was one) and its own goes to the next negative, so raw-score priorities nearly
    keep their distribution.

    Args:
        kappa: probability of demoting a positive clip, in [0, 1].
        threshold: a score strictly above it is positive (method, section 2); the same as replay's, where that has one.
        seed: of the control's own generator; ``None`` follows the run's, and is 0 without one.

    Raises:
        ValueError: ``kappa`` or ``threshold`` lies outside [0, 1].
    """

    name = "corrupted"

    def __init__(self, kappa: float = 0.1, threshold: float = 0.5, seed: int | None = None) -> None:
        for setting, value in (("kappa", kappa), ("threshold", threshold)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{setting} of the corrupted control must lie in [0, 1], got {value}")
        self.kappa = kappa
        self.threshold = threshold
        # Scores are float32: compared with the float32 neighbour of τ, a score of exactly τ is not above it.
        self._positive_above = float(np.float32(threshold))
        self._own_seed = seed
        self._rng = np.random.default_rng(seed or 0)
        self._owed: deque[float] = deque()  # scores of demoted positives that no negative has taken over yet
        self._latest_negative = 0.0
        self._demoted = 0
        self._promoted = 0
        self._worst_debt = 0

    def follow(self, seed: int) -> None:
        """Draws by the run's seed, unless it has its own."""
        if self._own_seed is None:
            self._rng = np.random.default_rng(seed)

    def apply(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Spoils the next scores of the stream.

        Args:
            scores: ``float32[B]`` in [0, 1], in order of arrival.

        Returns:
            ``float32[B]``.
        """
        spoiled = np.array(scores)
        # A number is drawn for negatives as well: which positives fall then depends on their place in the stream alone.
        for row, (score, draw) in enumerate(zip(scores.tolist(), self._rng.random(len(scores)).tolist(), strict=True)):
            if score > self._positive_above:
                if draw < self.kappa:
                    self._owed.append(score)
                    self._demoted += 1
                    self._worst_debt = max(self._worst_debt, len(self._owed))
                    spoiled[row] = self._latest_negative
                continue
            self._latest_negative = score
            if self._owed:
                spoiled[row] = self._owed.popleft()
                self._promoted += 1
        return spoiled

    def stats(self) -> dict[str, float]:
        """Counts clips: ``demoted``, ``promoted``, ``debt`` (positives still owed) and ``worst_debt`` so far."""
        return {
            "demoted": float(self._demoted),
            "promoted": float(self._promoted),
            "debt": float(len(self._owed)),
            "worst_debt": float(self._worst_debt),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that decides future answers, as plain lists, numbers and strings."""
        return {
            "owed": list(self._owed),
            "latest_negative": self._latest_negative,
            "demoted": self._demoted,
            "promoted": self._promoted,
            "worst_debt": self._worst_debt,
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where ``state`` was taken."""
        self._owed = deque(state["owed"])
        self._latest_negative = state["latest_negative"]
        self._demoted = state["demoted"]
        self._promoted = state["promoted"]
        self._worst_debt = state["worst_debt"]
        self._rng.bit_generator.state = state["rng"]


class Flipped:
    """Turns each score r into 1 − r with probability ``rate``: symmetric noise, as of a scorer that errs both ways.

    Unlike `Corrupted` it makes more positives of rare ones: where a tenth of the clips is positive, a rate of 0.1 makes
    that 18 %, half of it wrong.

    Args:
        rate: probability of turning a score round, in [0, 0.5]. Higher → scores say less; at 0.5, nothing.
        seed: of the control's own generator; ``None`` follows the run's, and is 0 without one.

    Raises:
        ValueError: ``rate`` lies outside [0, 0.5].
    """

    name = "flipped"

    def __init__(self, rate: float = 0.1, seed: int | None = None) -> None:
        if not 0.0 <= rate <= 0.5:
            raise ValueError(f"rate of the flipped control must lie in [0, 0.5], got {rate}")
        self.rate = rate
        self._own_seed = seed
        self._rng = np.random.default_rng(seed or 0)
        self._turned = 0

    def follow(self, seed: int) -> None:
        """Draws by the run's seed, unless it has its own."""
        if self._own_seed is None:
            self._rng = np.random.default_rng(seed)

    def apply(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Turns some of the next scores of the stream round, ``float32[B]`` in [0, 1] → ``float32[B]``."""
        turned = self._rng.random(len(scores)) < self.rate
        self._turned += int(turned.sum())
        return np.where(turned, 1 - scores, scores).astype(np.float32)

    def stats(self) -> dict[str, float]:
        """Returns how many clips' scores were ``turned``."""
        return {"turned": float(self._turned)}

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that decides future answers, as plain numbers and strings."""
        return {"turned": self._turned, "rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where ``state`` was taken."""
        self._turned = state["turned"]
        self._rng.bit_generator.state = state["rng"]
