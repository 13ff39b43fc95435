"""Ties the scoring service to a Lightning run: built when it starts, stopped however it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from vlmrb.callbacks.replay_checkpoint import ReplayCheckpoint
from vlmrb.preflight import Preflight
from vlmrb.scoring.cache import ScoreCache
from vlmrb.scoring.config import ScoringConfig
from vlmrb.scoring.scorer import ScoreControl, Scorer
from vlmrb.scoring.service import ScoringService

if TYPE_CHECKING:
    from vlmrb.algorithms.base import OffPolicyModule
    from vlmrb.replay.config import ReplayConfig

SEED = 6  # added to the run's, apart from what else draws by it


class ScoringCallback(Callback):
    """Builds a `ScoringService` on the module's buffer and hangs it at ``module.scoring``, where training polls it.

    It is there from ``on_fit_start`` on, before anything is collected, and stopped on success, on an exception, Ctrl-C
    and SIGTERM alike.

    Args:
        scorer: who scores clips; ``None`` scores nothing.
        control: changes scores on their way into the buffer (control experiments); ``None`` changes nothing.
        cache: ``memory`` remembers scores within the run; a path to a file or folder keeps them for other runs as well;
            ``None`` scores equal clips again and again.
        preflight: look ahead when a new run starts: refuse what cannot fit into memory or onto the disk, and a scorer
            that does not know the environment; warn of one that does not keep up; see `vlmrb.preflight`.
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
        self.control = control
        self.cache = cache
        self.preflight = preflight
        self.config = ScoringConfig(**settings)
        self._service: ScoringService | None = None
        self._cache: ScoreCache | None = None
        self._preflight: Preflight | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses a replay scheme that waits for scores which nobody gives, and settings that do not go together.

        Raises:
            ValueError: the scheme reads scores, and there is no scorer; the control calls other clips positive than the
                scheme does; or see `ScoringConfig.require_for`.
        """
        if stage == "fit":
            self.config.require_for(pl_module.training_config.frames_per_batch, pl_module.replay.clip_length)
            self._require_one_threshold(pl_module.replay)
        located = self.config.student is not None or self.config.bisect_to is not None
        if stage == "fit" and pl_module.replay.credit is not None and not located:
            raise ValueError(
                "replay.credit takes somebody who says what made a clip positive: set scoring.student, as "
                "configs/scorer/student.yaml does, or scoring.bisect_to, or replay.credit to null"
            )
        if stage == "fit" and pl_module.replay.credit is None and self.config.bisect_to is not None:
            raise ValueError(
                f"scoring.bisect_to={self.config.bisect_to} has no effect without replay.credit: set "
                "--replay.credit.window, or scoring.bisect_to to null"
            )
        if stage == "fit" and self.scorer is None and pl_module.needs_scores:
            raise ValueError(
                "replay.vlm and replay.score_reward read clip scores, but scoring.scorer is not set: name a scorer, or "
                "set both to null"
            )

    def _require_one_threshold(self, replay: ReplayConfig) -> None:
        ours, theirs = getattr(self.control, "threshold", None), replay.threshold_in_force
        if self.control is None or ours is None or theirs is None or ours == theirs[1]:
            return
        setting, threshold = theirs
        raise ValueError(
            f"scoring.control.threshold={ours} differs from {setting}={threshold}: the control {self.control.name!r} "
            f"would tell other clips positive than replay does; set --scoring.control.init_args.threshold {threshold}"
        )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Builds the service: the module's own `setup`, which makes the buffer, comes after a callback's.

        Raises:
            PreflightError: a new run cannot fit or be scored as it is set up.
        """
        self._preflight = None
        if self.preflight and not pl_module.env_steps:
            checkpoint = next((other for other in trainer.callbacks if isinstance(other, ReplayCheckpoint)), None)
            self._preflight = Preflight(pl_module, self.scorer, trainer.default_root_dir, checkpoint, self.config)
            self._preflight.require()
        if self.scorer is not None and self._service is None:
            self._start(pl_module, self.scorer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Watches, at the beginning of a run, whether the scorer keeps up."""
        if self._preflight is not None:
            self._preflight.after_batch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says what there is to say about the scorer of a run that was too short to watch it for long."""
        if self._preflight is not None:
            self._preflight.after_batch(last=True)

    def _start(self, module: OffPolicyModule, scorer: Scorer) -> None:
        if self.cache is not None:
            self._cache = ScoreCache(None if self.cache == "memory" else self.cache)
        self._service = module.scoring = ScoringService(
            module.buffer,
            scorer,
            module.renderer,
            cache=self._cache,
            control=self.control,
            pixels=module.observes_pixels,
            **vars(self.config.following(module.seed + SEED)),
        )
        if self._preflight is not None:
            self._preflight.watch(self._service)

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
