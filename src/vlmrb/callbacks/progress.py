"""The progress bar, counted in env steps."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from vlmrb.callbacks.pace import Pace

if TYPE_CHECKING:
    from vlmrb.algorithms.base import OffPolicyModule

SHOWN = 0.005  # share of the time spent waiting for the scorer below which it is not worth a word


class ProgressBar(TQDMProgressBar):
    """Shows env steps, success of the latest evaluation, steps/s, share of clips scored and ε.

    Where training waits for the scorer (`ScoringConfig.max_delay_env_steps`) it shows for which share of the time.

    Where the output is no terminal (a file, a CI log) it prints a plain line now and then instead.

    Args:
        refresh_s: seconds between two refreshes on a terminal, at least.
        line_s: seconds between two lines elsewhere, at least.
    """

    BAR_FORMAT = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} env steps [{elapsed}<{remaining}{postfix}]"

    def __init__(self, refresh_s: float = 0.5, line_s: float = 30.0) -> None:
        super().__init__()
        self.refresh_s = refresh_s
        self.line_s = line_s
        self._on_terminal = True
        self._total = 0
        self._started = (0.0, 0)  # time in seconds, env steps
        self._shown = (0.0, -1)
        self._pace = Pace(batches=64)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the bar at the env steps already taken."""
        self._on_terminal = sys.stdout.isatty()
        self._total = pl_module.training_config.total_env_steps
        self._started = (time.perf_counter(), pl_module.env_steps)
        self._shown = (self._started[0], -1)
        self._pace.restart()
        self.train_progress_bar = self.init_train_tqdm()

    def init_train_tqdm(self) -> Tqdm:
        """Returns a bar over env steps."""
        return Tqdm(
            total=self._total,
            initial=self._started[1],
            unit_scale=True,
            disable=self.is_disabled or not self._on_terminal,
            leave=True,
            dynamic_ncols=True,
            file=sys.stdout,
            bar_format=self.BAR_FORMAT,
        )

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        """Leaves the bar as it is: there is one epoch."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Refreshes the bar, or prints a line, when enough time has passed."""
        self._pace.tick(batch.numel())
        if time.perf_counter() - self._shown[0] >= (self.refresh_s if self._on_terminal else self.line_s):
            self._show(pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows where the run ended."""
        if self._shown[1] != pl_module.env_steps:
            self._show(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ends the bar's line, so that what is said about the exception begins on one of its own."""
        if self._train_progress_bar is not None:
            self._train_progress_bar.close()

    def _show(self, pl_module: OffPolicyModule) -> None:
        env_steps = min(pl_module.env_steps, self._total)  # the last batch may go beyond
        self._shown = (time.perf_counter(), pl_module.env_steps)
        status = ", ".join(self._status(pl_module))
        if self._on_terminal:
            self.train_progress_bar.n = env_steps
            self.train_progress_bar.set_postfix_str(status)
        elif self.is_enabled:
            seconds, first = self._shown[0] - self._started[0], self._started[1]
            left = (self._total - env_steps) * seconds / max(env_steps - first, 1)
            sys.stdout.write(
                f"{env_steps:,} of {self._total:,} env steps ({env_steps / self._total:.0%}), "
                f"{Tqdm.format_interval(seconds)} gone, {Tqdm.format_interval(left)} to go: {status}\n"
            )
            sys.stdout.flush()

    def _status(self, module: OffPolicyModule) -> list[str]:
        evaluation = getattr(module, "latest_evaluation", None)
        parts = [] if evaluation is None else [f"success {evaluation.success:.2f}"]
        parts.append(f"{self._pace.env_steps_per_s:,.0f} steps/s")
        if module.scoring is not None:
            stats = module.scoring.stats()
            parts.append(f"scored {stats['share_scored']:.0%}")
            if stats.get("throttled_share", 0.0) >= SHOWN:
                parts.append(f"waiting for it {stats['throttled_share']:.0%}")
        epsilon = module.gauges().get("epsilon")
        return parts if epsilon is None else [*parts, f"ε {epsilon:.2f}"]
