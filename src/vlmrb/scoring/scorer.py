"""What a scorer is, what may be done to its answers, and how an answer is checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch

Needs = Literal["frames", "snapshots", "observations"]
MAX_STATE_BYTES = 64 << 20  # of what a scorer has learned


class ScorerError(RuntimeError):
    """A scorer cannot be used as it is: it broke its contract or cannot be set up.

    Unlike a scorer that raises, hangs or dies, which costs only its answers, this ends the run: training on would
    quietly be something else than what was asked for.
    """


class Scorer(ABC):
    """Judges clips; a subclass needs a name, a version and `score`.

    The constructor stays light and its result picklable: the scorer may be sent to a process of its own before `setup`.
    A scorer keeps no state that changes its answers: clips reach it in no promised order, and equal clips only once.

    Attributes:
        name: short, for logs and tables; part of the score cache's key.
        version: changes whenever answers may change (weights, prompt, thresholds); part of the score cache's key.
        needs: what `score` reads off its clips.
        frame_size: upper bound of the frames' height and width in pixels; ``None`` is the environment's default.
        every_frame: whether answers rest on what changes from one frame to the next, so that clips must not be thinned
            (`ScoringConfig.frames_per_clip`).
        memory_bytes: GPU memory that the scorer takes in all, checked before `setup`; ``None`` if unknown.
    """

    name: str
    version: str
    needs: Needs = "frames"
    frame_size: int | None = None
    every_frame: bool = False
    memory_bytes: int | None = None

    def objection(self, clips: ClipBatch) -> str | None:
        """Says why the scorer cannot judge clips of an environment; asked before a run, before `setup`, by the learner.

        Args:
            clips: a clip of first states, with the environment's renderer.

        Returns:
            The reason, to stand behind "the scorer cannot judge this environment: "; ``None`` if nothing is known
            against it, as of scorers that take any environment.
        """
        return None

    def setup(self) -> None:  # noqa: B027 — optional to override
        """Loads what is heavy; called once, in the process or thread that scores."""

    @abstractmethod
    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        """Scores clips.

        Args:
            clips: B clips.

        Returns:
            ``float32[B]`` in [0, 1]: how sure the scorer is that the clip shows success (the paper's r).
        """

    def stats(self) -> dict[str, float]:
        """Reports on the scorer itself; asked after each batch, where `setup` was called.

        Returns:
            Name → number, a few of them; the metrics show each as ``scoring/scorer_NAME``.
        """
        return {}

    def details(self) -> NDArray[np.float32] | None:
        """Returns what the scorer knows of the latest batch beyond one number a clip.

        Returns:
            ``float32[B, …]``, of the same B clips; ``None``, as of most scorers, if there is nothing.
        """
        return None

    def state(self) -> bytes | None:
        """Returns what a student has learned, to be kept in checkpoints; asked after each batch.

        Returns:
            What `restore` takes, at most `MAX_STATE_BYTES`; ``None``, as of all scorers that learn nothing, if there is
            nothing new since it was last asked.
        """
        return None

    def restore(self, state: bytes) -> None:
        """Takes up what had been learned when `state` returned this; called before a batch, after `setup`."""
        raise NotImplementedError(f"scorer {self.name!r} learns nothing that could be restored")

    def forget(self) -> None:  # noqa: B027 — optional to override
        """Lets go of what earlier clips left behind to make later ones quicker, so that speed can be measured anew."""

    def close(self) -> None:  # noqa: B027 — optional to override
        """Frees what `setup` took; called once, where `setup` was called."""


@runtime_checkable
class ScoreControl(Protocol):
    """Changes scores on their way into the buffer, in the order in which they arrive (control experiments).

    It works on the learner's side, so its state is checkpointed and the score cache holds clean scores. One that tells
    positive scores from others has its τ in an attribute ``threshold``; a run is refused whose replay has another.

    Attributes:
        name: short, for logs and tables.
    """

    name: str

    def apply(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns what to write, ``float32[B]``, for the next ``float32[B]`` scores of the stream."""
        ...

    def stats(self) -> dict[str, float]:
        """Returns what to report."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that decides future answers, as plain types."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where ``state`` was taken."""
        ...


@runtime_checkable
class FollowsSeed(Protocol):
    """What draws by chance and can do so by the run's seed: a `ScoreControl` or a selection policy (optional)."""

    def follow(self, seed: int) -> None:
        """Hears the run's seed before anything else; one that was given a seed of its own keeps to that."""
        ...


def identity(scorer: Scorer) -> tuple[str, str]:
    """Returns a scorer's name and version, by which its scores are told from others'.

    Raises:
        ScorerError: one of them is missing, empty or no text.
    """
    for what in ("name", "version"):
        value = getattr(scorer, what, None)
        if not isinstance(value, str) or not value:
            kind = type(scorer)
            raise ScorerError(
                f'scorer class {kind.__module__}.{kind.__qualname__} needs a {what}: add {what} = "…" to it (its '
                f"{what} is {value!r}). Name and version tell its scores from others' in the cache"
            )
    return scorer.name, scorer.version


def require_thinnable(scorer: Scorer, frames_per_clip: int | None) -> None:
    """Refuses to thin clips for a scorer that needs every frame.

    Args:
        scorer: who scores.
        frames_per_clip: `ScoringConfig.frames_per_clip`.

    Raises:
        ScorerError: naming both.
    """
    if frames_per_clip is not None and scorer.every_frame:
        raise ScorerError(
            f"scorer {scorer.name!r} reads what happens off consecutive frames, and scoring.frames_per_clip="
            f"{frames_per_clip} leaves some out: set it to null, or choose another scorer"
        )


def checked_scores(scorer: Scorer, clips: ClipBatch) -> NDArray[np.float32]:
    """Asks a scorer and checks the form of its answer.

    Args:
        scorer: a scorer that has been set up.
        clips: B clips.

    Returns:
        ``float32[B]`` in [0, 1].

    Raises:
        ScorerError: the answer has a wrong shape or type, or holds something that is not a number in [0, 1].
        Exception: whatever the scorer raises.
    """
    answer = scorer.score(clips)
    name, expected = f"scorer {scorer.name!r}", f"expected float32[{len(clips)}] in [0, 1], one score per clip"
    plain = _without_tensors(answer)
    try:
        numbers = np.asarray(plain)
        if np.iscomplexobj(numbers):  # NumPy would drop the imaginary part
            raise TypeError("complex numbers have no place in [0, 1]")
        scores = numbers.astype(np.float32)
    except (TypeError, ValueError) as error:
        raise ScorerError(
            f"{name} returned a {type(answer).__name__} that is no array of real numbers; {expected}"
        ) from error
    if scores.shape != (len(clips),):
        raise ScorerError(f"{name} returned shape {scores.shape}; {expected}")
    bad = ~((scores >= 0) & (scores <= 1))  # written so that NaN is bad, too
    if bad.any():
        raise ScorerError(f"{name} returned {scores[bad][0]} for {bad.sum()} of {len(clips)} clips; {expected}")
    return scores


def checked_state(scorer: Scorer) -> bytes | None:
    """Asks a scorer what it has learned.

    Raises:
        ScorerError: that is more than `MAX_STATE_BYTES`.
    """
    state = scorer.state()
    if state is not None and len(state) > MAX_STATE_BYTES:
        raise ScorerError(
            f"scorer {scorer.name!r} has learned {len(state):,} bytes; a checkpoint keeps at most {MAX_STATE_BYTES:,}"
        )
    return state


def _without_tensors(answer: Any) -> Any:
    """Turns torch tensors, alone or listed, into arrays: NumPy takes none with a graph, from a GPU or of bfloat16."""
    if isinstance(answer, list | tuple):
        return [_without_tensors(part) for part in answer]
    if not callable(getattr(answer, "detach", None)):  # asked this way, as scoring processes need not have torch loaded
        return answer
    tensor = answer.detach().cpu()
    return np.asarray(tensor.float() if tensor.is_floating_point() else tensor)
