"""Settings of the callbacks. Importing this module loads neither torch nor Lightning."""

from __future__ import annotations

from dataclasses import dataclass

from vlmrb.ranges import AT_LEAST_ONE, SHARE, Range, require

_AT_LEAST_ONE_OR_NULL = AT_LEAST_ONE._replace(says="be at least 1, or null")
_DRAWABLE = Range("be at least 16 pixels", lambda value: value >= 16)


@dataclass(frozen=True)
class EvaluationConfig:
    """When and how the agent is evaluated.

    Attributes:
        every_n_env_steps: env steps between evaluations. Lower → finer curves, less training per second.
        episodes: episodes per evaluation. Higher → less noise (50 episodes: ±0.07 standard error at success 0.5).
        epsilon: share of random actions while evaluating; null is the algorithm's: 0.05 for DQN and IQN, whose greedy
            play loops on grid worlds and reads too low, 0 for SAC and TD3.
        seed: of the evaluation's levels, the same at every evaluation and apart from training.
        video_every_n_env_steps: env steps between two GIFs of an evaluation episode, beside one of the final policy;
            ``null`` writes none. Lower → more to look at, and up to a second each.
    """

    every_n_env_steps: int = 10_000
    episodes: int = 50
    epsilon: float | None = None
    seed: int = 1_000_003
    video_every_n_env_steps: int | None = 100_000

    def __post_init__(self) -> None:
        """Refuses settings that cannot work, naming them."""
        counts = {"every_n_env_steps": self.every_n_env_steps, "episodes": self.episodes}
        require(AT_LEAST_ONE, "evaluation", **counts)
        require(_AT_LEAST_ONE_OR_NULL, "evaluation", video_every_n_env_steps=self.video_every_n_env_steps)
        require(SHARE, "evaluation", epsilon=self.epsilon)


@dataclass(frozen=True)
class MonitoringConfig:
    """How often metrics are written and clips are drawn.

    Attributes:
        every_n_env_steps: env steps between two rows of metrics. Lower → finer curves, more noise in each point.
        clips_every_n_env_steps: env steps between two pairs of GIFs; ``null`` draws none.
        clip_frame_size: upper bound of the rendered frames, in pixels; small ones are enlarged for the eye.
    """

    every_n_env_steps: int = 5_000
    clips_every_n_env_steps: int | None = 50_000
    clip_frame_size: int = 256

    def __post_init__(self) -> None:
        """Refuses settings that cannot work, naming them."""
        require(AT_LEAST_ONE, "monitoring", every_n_env_steps=self.every_n_env_steps)
        require(_AT_LEAST_ONE_OR_NULL, "monitoring", clips_every_n_env_steps=self.clips_every_n_env_steps)
        require(_DRAWABLE, "monitoring", clip_frame_size=self.clip_frame_size)


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are saved, and what of them stays.

    Attributes:
        every_n_env_steps: env steps between checkpoints. Lower → less is lost in a crash, more time spent saving.
        save_replay: write the side-car. Without it a resumed run fills its buffer again before it goes on learning.
        keep: pairs that stay on disk. While one is written there is room needed for ``keep + 1``.
        save_on_end: save when the run is complete as well.
        replay_on_end: write the side-car then, too. Without it a finished run takes next to no room on the disk, as
            studies of many runs want it; one that is then continued with a larger budget fills its buffer again first.
        ignore_replay: resume without the side-car, which may be missing, damaged or of an older version.
    """

    every_n_env_steps: int = 50_000
    save_replay: bool = True
    keep: int = 1
    save_on_end: bool = True
    replay_on_end: bool = True
    ignore_replay: bool = False

    def __post_init__(self) -> None:
        """Refuses settings that cannot work, naming them."""
        require(AT_LEAST_ONE, "checkpoint", every_n_env_steps=self.every_n_env_steps, keep=self.keep)
