"""The ``scoring`` section of a configuration, for programs that train nothing and need not load what training takes."""

from __future__ import annotations

from typing import Any

from vlmrb.scoring.config import ScoringConfig
from vlmrb.scoring.scorer import ScoreControl, Scorer


class ScoringSection:
    """Takes the settings of `ScoringCallback`, and keeps those that concern the scorer and what it has scored.

    Args:
        scorer: who scores clips.
        control: not used.
        cache: see `ScoringCallback`.
        preflight: not used.
        **settings: see `ScoringConfig`.

    Raises:
        ValueError: a setting cannot work.
    """

    def __init__(
        self,
        scorer: Scorer | None = None,
        control: ScoreControl | None = None,
        cache: str | None = "memory",
        preflight: bool = True,
        **settings: Any,
    ) -> None:
        self.scorer = scorer
        self.cache = cache
        self.config = ScoringConfig(**settings)
