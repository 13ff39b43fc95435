"""What a run reports while it trains: metrics over env steps, and pictures of scored clips."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from numpy.typing import NDArray
from tensordict import TensorDictBase

from vlmrb.callbacks.config import MonitoringConfig
from vlmrb.callbacks.one_sided import OneSidedAnswers
from vlmrb.callbacks.pace import Pace
from vlmrb.loggers import start_loggers, tensorboard_writers
from vlmrb.media import annotate, clip_sheet, save_image, write_video

if TYPE_CHECKING:
    from vlmrb.algorithms.base import OffPolicyModule

log = logging.getLogger(__name__)
MIB = 1024**2


class EpisodeStatistics:
    """Means over finished episodes, read off collected blocks; an episode may span any number of blocks."""

    def __init__(self) -> None:
        # Of each quantity: return, length in env steps, number of steps that reached the goal.
        self._running = np.zeros((3, 0))  # per environment, since its episode began
        self._sums = np.zeros(3)
        self._count = 0

    def update(self, batch: TensorDictBase) -> None:
        """Takes in a block ``[n_envs, T]`` as a collector delivers it; a few array operations, whatever its size."""
        after = batch.get("next")
        reward, done, success = (after.get(key).numpy().reshape(batch.shape) for key in ("reward", "done", "success"))
        if self._running.shape[1] != len(reward):
            self._running = np.zeros((3, len(reward)))
        total = np.stack([reward, np.ones_like(reward), success], dtype=np.float64).cumsum(-1)  # [3, n, T]
        total += self._running[..., None]
        self._running = total[..., -1].copy()
        env, step = np.nonzero(done)  # by environment, then by time
        if not len(env):
            return
        ends = total[:, env, step]  # [3, E], since the beginning of the environment's first episode in this block
        first = np.append(True, env[1:] != env[:-1])
        last = np.append(first[1:], True)
        begins = np.where(first, 0.0, np.roll(ends, 1, axis=-1))
        episodes = ends - begins
        episodes[2] = episodes[2] > 0
        self._sums += episodes.sum(-1)
        self._count += len(env)
        self._running[:, env[last]] -= ends[:, last]

    def end_streams(self) -> None:
        """All running episodes end here and count for nothing; what comes next are new ones."""
        self._running[:] = 0.0

    def take(self) -> dict[str, float]:
        """Returns number and means of the episodes finished since the last call; no means when there are none."""
        count, (returns, length, success) = self._count, self._sums.tolist()
        self._count, self._sums = 0, np.zeros(3)
        if not count:
            return {"episodes": 0}
        return {
            "episodes": count,
            "return": returns / count,
            "episode_length": length / count,
            "success": success / count,
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns lists and numbers only."""
        return {"running": self._running.tolist(), "sums": self._sums.tolist(), "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        self._running, self._sums = np.array(state["running"]).reshape(3, -1), np.array(state["sums"])
        self._count = state["count"]


class MonitoringCallback(Callback):
    """Writes metrics to all of the trainer's loggers, and GIFs of the highest- and the lowest-scored clip.

    The x-axis is env steps. What depends on the wall clock has names beginning with ``time/``; with a ``sync`` scorer
    everything else is the same for the same seed. docs/metrics.md says what each metric means.

    Args:
        **settings: see `MonitoringConfig`.

    Attributes:
        config: the settings.
    """

    def __init__(self, **settings: Any) -> None:
        self.config = MonitoringConfig(**settings)
        self._reset()

    def _reset(self) -> None:
        self.episodes = EpisodeStatistics()
        self._logged_at = 0  # env steps
        self._drawn_at = 0  # env steps
        self._scored = 0  # when metrics were last written; so are the next two
        self._positives = 0
        self._histogram: NDArray[np.int64] | None = None
        self._one_sided = OneSidedAnswers()
        self._wall_s = 0.0  # spent training before the last interruption
        self._started = time.perf_counter()
        self._pace = Pace()
        self._clocked = (0, 0, 0.0)  # env steps, gradient steps and seconds in these, when metrics were last written

    def state_dict(self) -> dict[str, Any]:
        """Returns the window under way, as lists and numbers, so that a resumed run reports it whole."""
        return {
            "episodes": self.episodes.state_dict(),
            "logged_at": self._logged_at,
            "drawn_at": self._drawn_at,
            "scored": self._scored,
            "positives": self._positives,
            "histogram": None if self._histogram is None else self._histogram.tolist(),
            "one_sided": self._one_sided.state_dict(),
            "wall_s": self._wall_s + time.perf_counter() - self._started,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up an interrupted run's window."""
        self.episodes.load_state_dict(state_dict["episodes"])
        self._logged_at = state_dict["logged_at"]
        self._drawn_at = state_dict["drawn_at"]
        self._scored = state_dict["scored"]
        self._positives = state_dict["positives"]
        histogram = state_dict["histogram"]
        self._histogram = None if histogram is None else np.array(histogram)
        self._one_sided.load_state_dict(state_dict.get("one_sided", {}))  # a run of an earlier version has none
        self._wall_s = state_dict["wall_s"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the loggers of a new run, before any callback logs something."""
        self._resumed = bool(pl_module.env_steps)
        if not self._resumed:
            self._reset()
            start_loggers(trainer.loggers, 0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Makes the loggers forget what lies beyond the checkpoint, once nothing can refuse the resume any more.

        What began anew with the resume is followed from there on: episodes of environments that could not go on where
        they were, and the counts of a scoring service that was not restored, for lack of a side-car.
        """
        if self._resumed:
            self._resumed = False
            start_loggers(trainer.loggers, pl_module.env_steps)
            if not pl_module.exact_resume:
                self.episodes.end_streams()
            if pl_module.scoring is not None and pl_module.scoring.stats()["scored"] < self._scored:
                self._scored, self._positives, self._histogram = 0, 0, None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clocks."""
        self._started = time.perf_counter()
        self._start_clock(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TensorDictBase, batch_idx: int
    ) -> None:
        """Follows the episodes; writes metrics and draws clips when they are due, and when the budget is spent."""
        self._pace.tick(batch.numel())
        self.episodes.update(batch)
        env_steps = pl_module.env_steps
        complete = env_steps >= pl_module.training_config.total_env_steps
        every = self.config.every_n_env_steps
        if complete or env_steps // every > self._logged_at // every:
            self._log(trainer, pl_module)
        every = self.config.clips_every_n_env_steps or 0
        if every and (complete or env_steps // every > self._drawn_at // every):
            self._draw(trainer, pl_module)

    # Metrics

    def _log(self, trainer: Trainer, module: OffPolicyModule) -> None:
        episodes = self.episodes.take()
        metrics = self._train_metrics(module, episodes) | self._replay_metrics(module)
        metrics |= self._scoring_metrics(trainer, module, episodes)
        # NaN stands for "none yet" (no episode, no answer); only a loss can be NaN in earnest, and that must be seen.
        metrics = {name: value for name, value in metrics.items() if not math.isnan(value)}
        metrics |= {f"train/{name}": value for name, value in module.take_metrics().items()}
        metrics |= self._time_metrics(module)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=module.env_steps)
        self._logged_at = module.env_steps
        self._start_clock(module)

    def _start_clock(self, module: OffPolicyModule) -> None:
        self._pace.restart()
        self._clocked = (module.env_steps, module.grad_steps, module._update_seconds)

    def _train_metrics(self, module: OffPolicyModule, episodes: Mapping[str, float]) -> dict[str, float]:
        metrics = {f"train/{name}": value for name, value in episodes.items()}
        metrics |= {f"train/{name}": value for name, value in module.gauges().items()}
        return metrics | {"train/grad_steps": module.grad_steps}

    def _replay_metrics(self, module: OffPolicyModule) -> dict[str, float]:
        stats = module.buffer.stats()
        metrics: dict[str, float] = {
            "replay/size": len(module.buffer),
            "replay/lambda": stats["lam"],
            "replay/beta": stats.get("beta", math.nan),
            "replay/positives": stats["positives"],
            "replay/uniform_fallbacks": stats["uniform_fallbacks"],
            "replay/stale_td_errors": stats["stale/td_error"],
            "replay/memory_mib": stats["bytes"] / MIB,
        }
        if len(module.buffer):
            for name, value in module.buffer.replay_frequencies().items():
                metrics[f"replay/{name.replace('/', '_')}"] = value
        return metrics | {f"replay/{name}": value for name, value in module.buffer.gauges().items()}

    def _scoring_metrics(
        self, trainer: Trainer, module: OffPolicyModule, episodes: Mapping[str, float]
    ) -> dict[str, float]:
        if module.scoring is None:
            return {}
        stats = module.scoring.stats()
        scored, positives = int(stats["scored"]), int(stats.pop("positives"))
        answers = scored - self._scored
        stats["share_positive"] = (positives - self._positives) / answers if answers else math.nan
        self._warn_of_one_sided_answers(module, answers, positives - self._positives, episodes)
        self._scored, self._positives = scored, positives
        self._log_histogram(trainer, module)
        wall_clock = ("clips_per_s", "latency_ms_p50", "latency_ms_p95")
        return {
            f"{'time/scoring_' if name in wall_clock else 'scoring/'}{name}": value for name, value in stats.items()
        }

    def _warn_of_one_sided_answers(
        self, module: OffPolicyModule, answers: int, positives: int, episodes: Mapping[str, float]
    ) -> None:
        assert module.scoring is not None
        scorer, in_force = module.scoring.scorer, module.replay.threshold_in_force
        if in_force is None:  # raw scores need not be on both sides of anything
            return
        found = self._one_sided.look(answers, positives, int(episodes["episodes"]), episodes.get("success", 0.0))
        if found is None:
            return
        asks = getattr(scorer, "question", None) or getattr(scorer, "prompt", None)
        setting, threshold = in_force
        pays = setting == "replay.score_reward.threshold"
        log.warning(
            "scorer %r %s scored above %s=%g. This tells nothing apart, and %s. %s %s, or %s; `vlmrb calibrate` judges "
            "both on labelled clips, see docs/calibration.md (said once)",
            *(scorer.name, found, setting, threshold),
            "all clips are paid alike" if pays else "replay is as good as uniform",
            *("Raise" if positives else "Lower", setting),
            "change scoring.scorer.prompt" if asks else "take another scorer",
        )

    def _log_histogram(self, trainer: Trainer, module: OffPolicyModule) -> None:
        """Shows the scores since the last time in TensorBoard."""
        assert module.scoring is not None
        counts, edges = module.scoring.histogram()
        new = counts if self._histogram is None else counts - self._histogram
        self._histogram = counts
        if not new.sum():
            return
        middles = (edges[1:] + edges[:-1]) / 2
        for writer in tensorboard_writers(trainer.loggers):
            writer.add_histogram_raw(
                "scoring/scores",
                min=edges[0],
                max=edges[-1],
                num=new.sum(),
                sum=(new * middles).sum(),
                sum_squares=(new * middles**2).sum(),
                bucket_limits=edges[1:].tolist(),
                bucket_counts=new.tolist(),
                global_step=module.env_steps,
            )

    def _time_metrics(self, module: OffPolicyModule) -> dict[str, float]:
        env_steps, grad_steps, update_s = self._clocked
        env_steps, grad_steps = module.env_steps - env_steps, module.grad_steps - grad_steps
        pace = self._pace.env_steps_per_s
        metrics = {
            "time/wall_s": self._wall_s + time.perf_counter() - self._started,
            "time/env_steps_per_s": pace,
            "time/grad_steps_per_s": pace * grad_steps / env_steps,
        }
        if grad_steps:
            metrics["time/update_ms"] = 1000 * (module._update_seconds - update_s) / grad_steps
        return metrics

    # Clips

    def _draw(self, trainer: Trainer, module: OffPolicyModule) -> None:
        """Draws clips scored since the last time: GIFs of the highest and the lowest score, a sheet of up to four."""
        since, self._drawn_at = self._drawn_at, module.env_steps
        store = module.buffer.clips
        if store is None or not len(store):
            return
        table = store.table()
        known = ~np.isnan(table["score"])
        if (known & (table["born"] > since)).any():
            known &= table["born"] > since
        newest_last = np.flatnonzero(known)[np.argsort(table["clip_id"][known])]
        clip_ids, scores, born = (table[name][newest_last] for name in ("clip_id", "score", "born"))
        if not len(clip_ids):
            return
        clips = {}  # the newest clip of up to four scores, evenly spaced among the scores seen, highest first
        for score in _spread(np.unique(scores)):
            chosen = np.flatnonzero(scores == score)[-1]
            clip = store.batch([int(clip_ids[chosen])], module.renderer)
            frames = clip.frames(self.config.clip_frame_size)[0, : clip.lengths[0]]
            clips[f"score {score:.2f} · step {born[chosen]:,}"] = frames
        for name, caption in {"high": next(iter(clips)), "low": list(clips)[-1]}.items():
            write_video(trainer, name, annotate(clips[caption], caption), module.env_steps)
        sheet = clip_sheet(list(clips.values()), list(clips))
        save_image(Path(trainer.default_root_dir) / "clips" / f"step_{module.env_steps:08d}_sheet.png", sheet)


def _spread(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns up to four of ascending scores, the highest first and the lowest last."""
    return scores[np.unique(np.linspace(0, len(scores) - 1, 4).round().astype(int))[::-1]]
