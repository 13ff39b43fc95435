"""What a student has been told: answered clips, of which those with a yes are kept apart, since they are few."""

from __future__ import annotations

from collections import deque

import numpy as np

from vlmrb.scoring.student.parts import Parts

MEMORY_MB = 128  # MiB of inputs in each of the two queues, at most


class AnsweredClips:
    """Two queues, of positive and of negative clips; the oldest of a full one goes first.

    Args:
        max_clips: most clips in each.
        max_bytes: most bytes of inputs in each.
    """

    def __init__(self, max_clips: int, max_bytes: int) -> None:
        self._max_clips = max_clips
        self._max_bytes = max_bytes
        self._clips: tuple[deque[tuple[Parts, float]], deque[tuple[Parts, float]]] = (deque(), deque())
        self._bytes = [0, 0]

    def __len__(self) -> int:
        return sum(map(len, self._clips))

    @property
    def positives(self) -> int:
        """Number of positive clips."""
        return len(self._clips[1])

    @property
    def both(self) -> bool:
        """Whether there are clips of both kinds, without which there is nothing to learn."""
        return all(self._clips)

    def add(self, parts: Parts, target: float, positive: bool) -> None:
        """Remembers a clip.

        Args:
            parts: of one clip.
            target: what to learn, in [0, 1].
            positive: in which queue it goes.
        """
        clips = self._clips[positive]
        clips.append((parts, target))
        self._bytes[positive] += parts.inputs.nbytes
        while len(clips) > self._max_clips or (self._bytes[positive] > self._max_bytes and len(clips) > 1):
            self._bytes[positive] -= clips.popleft()[0].inputs.nbytes

    def draw(self, count: int, rng: np.random.Generator) -> tuple[list[Parts], list[float]]:
        """Draws clips, half of each kind, with replacement.

        Args:
            count: of clips.
            rng: draws.
        """
        halves = (count - count // 2, count // 2)
        drawn = [
            clips[place]
            for clips, half in zip(self._clips, halves, strict=True)
            for place in rng.integers(len(clips), size=half).tolist()
        ]
        return [parts for parts, _ in drawn], [target for _, target in drawn]
