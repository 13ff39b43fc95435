"""Ties the scoring service to a Lightning run: built when it starts, stopped however it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from vlmrb.scoring.cache import ScoreCache
from vlmrb.scoring.config import ScoringConfig
from vlmrb.scoring.scorer import ScoreControl, Scorer
from vlmrb.scoring.service import ScoringService

if TYPE_CHECKING:
    from vlmrb.algorithms.base import OffPolicyModule


class ScoringCallback(Callback):
    """Builds a `ScoringService` on the module's buffer and hangs it at ``module.scoring``, where training polls it.

    It is there from ``on_fit_start`` on, before anything is collected, and stopped on success, on an exception, Ctrl-C
    and SIGTERM alike.

    Args:
        scorer: who scores clips; ``None`` scores nothing.
        control: changes scores on their way into the buffer (control experiments); ``None`` changes nothing.
        cache: ``memory`` remembers scores within the run; a path to a file or folder keeps them for other runs as well;
            ``None`` scores equal clips again and again.
        **settings: see `ScoringConfig`.

    Raises:
        ValueError: a setting cannot work.
    """

    def __init__(
        self,
        scorer: Scorer | None = None,
        control: ScoreControl | None = None,
        cache: str | None = "memory",
        **settings: Any,
    ) -> None:
        self.scorer = scorer
        self.control = control
        self.cache = cache
        self.config = ScoringConfig(**settings)
        self._service: ScoringService | None = None
        self._cache: ScoreCache | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses a replay scheme that waits for scores which nobody gives.

        Raises:
            ValueError: the scheme reads scores, and there is no scorer.
        """
        if stage == "fit" and self.scorer is None and pl_module.needs_scores:
            raise ValueError(
                "replay.vlm reads clip scores, but scoring.scorer is not set: name a scorer, or set replay.vlm to null"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Builds the service: the module's own `setup`, which makes the buffer, comes after a callback's."""
        if self.scorer is not None and self._service is None:
            self._start(pl_module, self.scorer)

    def _start(self, module: OffPolicyModule, scorer: Scorer) -> None:
        if self.cache is not None:
            self._cache = ScoreCache(None if self.cache == "memory" else self.cache)
        self._service = module.scoring = ScoringService(
            module.buffer, scorer, module.renderer, cache=self._cache, control=self.control, **vars(self.config)
        )

    def close(self) -> None:
        """Stops the scorer; may be called more than once. The module keeps the service for its statistics."""
        if self._service is not None:
            self._service.close()
        if self._cache is not None:
            self._cache.close()
        self._service = self._cache = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stops the scorer: no ``teardown`` follows an exception, Ctrl-C or SIGTERM."""
        self.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stops the scorer."""
        self.close()
