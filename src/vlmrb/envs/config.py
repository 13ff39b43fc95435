"""Which environment, how many of them, and how their frames look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from vlmrb.envs.registry import find_family
from vlmrb.ranges import POSITIVE, require

Visuals = Literal["standard", "misleading", "abstract"]
RenderQuality = Literal["fast", "shadows", "full"]

# Settings that only families take which name them in `TAKES`, and their defaults.
_TAKEN_BY_SOME: dict[str, Any] = {"kwargs": None, "wrappers": None, "state": None, "render_quality": "fast"}

ENDLESS_STEPS: Final = 100_000  # env steps of an episode without ``max_steps`` beyond which no end is waited for


@dataclass(frozen=True)
class EnvConfig:
    """Settings of the training environments; evaluation uses the same with other seeds.

    Attributes:
        id: name of the environment. ``MiniGrid-DoorKey-NxN-v0`` for any N from 5 on is stepped as one batch of arrays,
            other MiniGrid ids, OGBench's (``scene-play-singletask-task3-v0``) and any Gymnasium id with ``rgb_array``
            frames one instance at a time (100 to 200 times slower). ``package.module:Id`` imports the module first, so
            that it can register what it brings.
        num_envs: instances stepped together. More → cheaper steps and more varied batches, but older data between two
            updates and fewer episodes per instance. Throughput of the array-stepped ids levels off near 64.
        visuals: how frames look; dynamics and observations never change. ``standard``: MiniGrid's own sprites;
            ``misleading``: sprites swapped (a key looks like a ball); ``abstract``: textures without meaning. The last
            two measure how much a scorer leans on what sprites resemble, and exist for MiniGrid ids only.
        tile_size: edge of a tile in pixels when no frame size is asked for (MiniGrid). Larger → clearer to a scorer,
            and rendering cost grows with its square: 32 is MiniGrid's own, 8 the least at which all sprites differ.
        frame_size: longest side in pixels of the stored frame of plain Gymnasium ids, whose state cannot be drawn
            again, and of OGBench's frames where a scorer asks for no size. Larger → clearer to a scorer, and, for the
            former, 3·frame_size² bytes per stored step: 12 kB at 64, 197 kB at 256.
        render_quality: how OGBench's frames are drawn. ``fast``: everything is there, but no shadows, reflections, sky
            and smoothed edges; ``shadows``: with coarse shadows, which tell a lifted cube from a lying one, at a
            third of the speed; ``full``: upstream's look, nine times slower without a GPU.
        max_steps: horizon in env steps after which an episode is truncated; ``None`` takes the environment's own
            (10·N² for DoorKey). Shorter → faster resets and fewer chances of a lucky success. An environment without
            a horizon of its own needs one: evaluating and recording play whole episodes, and end with an error where
            one exceeds 100,000 steps with ``None`` here.
        workers: processes that share the instances of Gymnasium-stepped ids; 0 steps all of them in this process.
            Worth it from about a millisecond per step on; array-stepped ids refuse it, they are faster without.
        worker_timeout_s: seconds without an answer after which a worker is taken to hang, is killed and ends the run;
            ``None`` waits for ever. Its first answer, before which it imports and makes its instances, has at least 180
            s. Must exceed what the slowest reset or step of all the worker's instances takes. Lower → a hanging
            environment is noticed sooner. Without workers nothing can be interrupted.
        actions: the environment's own numbers of the discrete actions that the agent may choose, such as
            ``[0, 1, 2, 3, 5]`` for DoorKey without dropping the key and doing nothing; ``None`` gives it all. Fewer →
            random play reaches more, and results are no longer those of the original task.
        kwargs: arguments of ``gymnasium.make`` besides the id (plain Gymnasium ids only).
        wrappers: Gymnasium wrappers put around each instance, innermost first (plain Gymnasium ids only): class paths,
            or ``{class_path: …, init_args: {…}}``. A frame stack hides from the scorer nothing that ``render`` shows.
        state: ``package.module:name`` (or a module) of ``get_state(env) -> array`` and ``set_state(env, array)``, by
            which a plain Gymnasium state is stored instead of its frame and drawn when a scorer asks. ``None`` stores
            frames: 3·frame_size² bytes and one ``render()`` for every step.
        success: ``package.module:function``, called as ``function(info, reward, terminated, truncated) -> bool`` after
            every step of plain Gymnasium ids; an episode counts as a success if one of its steps does. ``None`` reads
            ``info["success"]`` or ``info["is_success"]``, else a positive reward at termination counts.
    """

    id: str = "MiniGrid-DoorKey-6x6-v0"
    num_envs: int = 32
    visuals: Visuals = "standard"
    tile_size: int = 8
    frame_size: int = 64
    render_quality: RenderQuality = "fast"
    max_steps: int | None = None
    workers: int = 0
    worker_timeout_s: float | None = 300.0
    actions: list[int] | None = None
    kwargs: dict[str, Any] | None = None
    wrappers: list[str | dict[str, Any]] | None = None
    state: str | None = None
    success: str | None = None

    def __post_init__(self) -> None:
        """Checks what can be checked without making the environment.

        Raises:
            ValueError: a setting is out of range, or the id is unknown.
        """
        for name in ("num_envs", "tile_size", "frame_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"env.{name} must be at least 1, got {getattr(self, name)}")
        if self.visuals not in ("standard", "misleading", "abstract"):
            raise ValueError(f"env.visuals must be standard, misleading or abstract, got {self.visuals!r}")
        if self.render_quality not in ("fast", "shadows", "full"):
            raise ValueError(f"env.render_quality must be fast, shadows or full, got {self.render_quality!r}")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"env.max_steps must be at least 1, got {self.max_steps}")
        if not 0 <= self.workers <= self.num_envs:
            raise ValueError(f"env.workers must be between 0 and num_envs = {self.num_envs}, got {self.workers}")
        require(POSITIVE, "env", worker_timeout_s=self.worker_timeout_s)
        if self.actions is not None and (
            len(self.actions) < 2 or min(self.actions) < 0 or len(set(self.actions)) < len(self.actions)
        ):
            raise ValueError(f"env.actions must be two or more different action numbers from 0 on, got {self.actions}")
        if self.success is not None and ":" not in self.success:
            raise ValueError(f"env.success must look like package.module:function, got {self.success!r}")
        for wrapper in self.wrappers or []:
            if not isinstance(wrapper, str) and not _is_class_with_arguments(wrapper):
                raise ValueError(f"env.wrappers holds class paths or {{class_path, init_args}}, got {wrapper}")
        family = find_family(self.id)
        for name, default in _TAKEN_BY_SOME.items():
            if getattr(self, name) != default and name not in getattr(family, "TAKES", ()):
                raise ValueError(f"env.{name} does nothing for {self.id!r}: leave it out")
        family.check(self)

    def check_length(self, steps: int) -> None:
        """Refuses an episode that seems never to end.

        Args:
            steps: env steps that an episode has taken and not ended; any number is right if ``max_steps`` is set.

        Raises:
            ValueError: there are more than ``ENDLESS_STEPS`` of them.
        """
        if self.max_steps is None and steps > ENDLESS_STEPS:
            raise ValueError(
                f"env.id {self.id!r}: an episode has not ended after {ENDLESS_STEPS:,} env steps: set env.max_steps"
            )


def _is_class_with_arguments(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() <= {"class_path", "init_args"}
        and isinstance(value.get("class_path"), str)
        and isinstance(value.get("init_args", {}), dict)
    )
