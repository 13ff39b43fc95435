"""The queue in front of the scorer: bounded, ordered by the selection policy, one entry per distinct content."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.meter import Counts
from vlmrb.scoring.policy import SelectionPolicy, WaitingClips


@dataclass(slots=True)
class Content:
    """Clips that look the same to the scorer and so share one score.

    Attributes:
        key: the cache's key, or made from the clip's id if there is no cache.
        clip_ids: in order of completion.
        completed: env step at which each was completed.
        attempts: how often the scorer failed on it.
        described: what the selection policy said of it (`SelectionPolicy.describe`).
        guess: the probability that the scorer finds it positive, in [0, 1], for policies that go by it; NaN if nobody
            has told.
        evidence: it would have waited here whatever the guess, so that the answer tells how good guesses are.
        audited: those of the clips that have been drawn to be audited (`audit.Audit`).
    """

    key: bytes
    clip_ids: list[int]
    completed: list[int]
    attempts: int = 0
    described: Any = None
    guess: float = math.nan
    evidence: bool = False
    audited: list[int] = field(default_factory=list)


class AdmissionQueue:
    """Holds what waits for the scorer, and remembers what has been handed to it until that is settled.

    A clip that equals one waiting or handed over joins it. Entries with audited clips go before all others, otherwise
    the policy decides. A clip leaves as *stale* once none of its rows lives, as
    *dropped* if there is no room; both are counted in ``counts``.

    Args:
        policy: which clips go first.
        max_waiting: most entries; ``None`` for no bound.
        alive: tells whether a clip still has rows.
        counts: where stale and dropped clips are counted.
    """

    def __init__(
        self, policy: SelectionPolicy, max_waiting: int | None, alive: Callable[[int], bool], counts: Counts
    ) -> None:
        self.policy = policy
        self.waiting: dict[bytes, Content] = {}
        self._max_waiting = max_waiting
        self._alive = alive
        self._counts = counts
        self._known: dict[bytes, Content] = {}  # waiting or handed over

    def __len__(self) -> int:
        """Entries not settled, those handed over included."""
        return len(self._known)

    def add(
        self,
        key: bytes,
        clip_id: int,
        completed: int,
        attempts: int = 0,
        described: Any = None,
        audited: bool = False,
        guess: float = math.nan,
        evidence: bool = False,
    ) -> None:
        """Admits a clip; `bound` afterwards keeps the queue within its size."""
        content = self._known.get(key)
        if content is None:
            content = self._known[key] = self.waiting[key] = Content(key, [], [], described=described)
        content.clip_ids.append(clip_id)
        content.completed.append(completed)
        content.attempts = max(content.attempts, attempts)
        content.guess = guess if math.isnan(content.guess) else content.guess
        content.evidence |= evidence
        if audited:
            content.audited.append(clip_id)

    def overdue(self, before: int) -> list[Content]:
        """Returns the entries not settled, those handed over included, with a clip completed before that env step."""
        return [content for content in self._known.values() if any(step < before for step in content.completed)]

    def drop_overdue(self, before: int) -> None:
        """Drops the clips that wait and were completed before that env step; later ones like them go on waiting."""
        for content in list(self.waiting.values()):
            self._counts.dropped += self._keep(content, [step >= before for step in content.completed])

    def bound(self) -> None:
        """Makes room: clips whose rows are gone leave first, then the policy's last choices."""
        if self._max_waiting is None or len(self.waiting) <= self._max_waiting:
            return
        self._prune(list(self.waiting.values()))
        if len(self.waiting) > self._max_waiting:
            contents = list(self.waiting.values())
            for place in self._rank(contents)[self._max_waiting :]:
                self.drop(contents[place])

    def choose(self, count: int) -> list[Content]:
        """Hands over the policy's first choices that still have rows.

        What the scorer has failed on before goes alone, so that one bad clip does not take others with it.

        Args:
            count: most entries.

        Returns:
            The entries, none only if no clip that waited has rows any more.
        """
        contents = list(self.waiting.values())
        if len(contents) > count:
            contents = [contents[place] for place in self._rank(contents)]
        chosen: list[Content] = []
        for content in contents:
            if chosen and content.attempts:
                continue
            self._prune([content])
            if content.clip_ids:
                chosen.append(content)
                del self.waiting[content.key]
                if len(chosen) == count or content.attempts:
                    break
        return chosen

    def put_back(self, content: Content) -> None:
        """Takes back what was handed over and got no score."""
        self.waiting[content.key] = content

    def settle(self, content: Content) -> None:
        """Forgets an entry: its score has come."""
        del self._known[content.key]
        self.waiting.pop(content.key, None)

    def drop(self, content: Content) -> None:
        """Forgets an entry: it will get no score."""
        self._counts.dropped += len(content.clip_ids)
        self.settle(content)

    def drop_all(self) -> None:
        """Forgets everything, what was handed over included."""
        for content in list(self._known.values()):
            self.drop(content)

    def _prune(self, contents: Iterable[Content]) -> None:
        for content in contents:
            self._counts.stale += self._keep(content, [self._alive(clip_id) for clip_id in content.clip_ids])

    def _keep(self, content: Content, kept: list[bool]) -> int:
        """Keeps some clips of an entry, and the entry if any are left; returns how many went."""
        if not all(kept):
            content.clip_ids = list(compress(content.clip_ids, kept))
            content.completed = list(compress(content.completed, kept))
            if not content.clip_ids:
                self.settle(content)
        return kept.count(False)

    def _rank(self, contents: list[Content]) -> NDArray[np.int64]:
        order = self.policy.rank(
            WaitingClips(
                [content.clip_ids for content in contents],
                [content.completed for content in contents],
                [content.described for content in contents],
                np.array([content.guess for content in contents]),
            )
        )
        audited = np.array([bool(content.audited) for content in contents])[order]
        return np.concatenate([order[audited], order[~audited]])
