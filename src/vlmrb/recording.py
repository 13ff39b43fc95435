"""`vlmrb record`: plays episodes and keeps all of them, for a run to start with."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict
from tqdm import tqdm  # type: ignore[import-untyped]

from vlmrb.calibration.policies import MakePlayer, PolicyName, make_player
from vlmrb.envs import EnvConfig, make_env
from vlmrb.replay.prefill import write_episode
from vlmrb.settings import load_env

log = logging.getLogger(__name__)


PATTERN = "episode-*.npz"


def episode_files(folder: Path) -> list[Path]:
    """Returns the episodes in a folder, in the order of their names."""
    return sorted(folder.glob(PATTERN))


@dataclass(frozen=True)
class Recording:
    """What a folder of episodes was recorded with, in its ``recording.json``.

    Attributes:
        env: the environment; numbers of instances and frame settings do not matter to who starts a run with it.
        policy: who played.
        episodes: how many were asked for.
        ckpt: the agent.
        epsilon: share of its random actions.
        seed: of levels and actions.
        complete: whether all episodes are there.
    """

    env: EnvConfig
    policy: PolicyName
    episodes: int
    ckpt: str | None
    epsilon: float
    seed: int
    complete: bool = False

    def write(self, folder: Path) -> None:
        """Writes the file."""
        (folder / "recording.json").write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Recording | None:
        """Reads the file; ``None`` if there is none, as with episodes from elsewhere.

        Raises:
            ValueError: it is damaged, or of another version.
        """
        path = folder / "recording.json"
        if not path.exists():
            return None
        try:
            settings = json.loads(path.read_text())
            return cls(**{**settings, "env": EnvConfig(**settings["env"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} cannot be read by this version: {error}") from error


def record(
    out: str,
    configs: Sequence[str] = (),
    policy: PolicyName = "scripted",
    episodes: int = 100,
    ckpt: str | None = None,
    epsilon: float = 0.05,
    seed: int = 0,
) -> int:
    """Plays episodes and writes each to a file; start a run with them by `vlmrb fit --prefill FOLDER`.

    Repeat the command after an interruption: it plays the same episodes again.

    Args:
        out: folder for the episodes, new or without any.
        configs: configurations with an `env` section, as for `vlmrb fit`; also written -c.
        policy: who plays: `random`; `scripted`, an expert and chance by turns, where there is one; `checkpoint`.
        episodes: how many.
        ckpt: the agent's checkpoint (`checkpoint` only).
        epsilon: share of the agent's actions that are random (`checkpoint` only).
        seed: of levels and actions.
    """
    if episodes < 1:
        raise ValueError(f"--episodes {episodes} must be at least 1")
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"--out {out} is a file: name a folder")
    config = load_env(configs)
    recording = Recording(config, policy, episodes, ckpt, epsilon, seed)
    begun = Recording.read(folder)
    if begun is None and episode_files(folder) or begun is not None and (begun.complete or begun != recording):
        raise FileExistsError(f"--out {out} already holds recorded episodes: name another folder")
    player = make_player(policy, config, ckpt, epsilon)
    folder.mkdir(parents=True, exist_ok=True)
    recording.write(folder)
    successes = 0
    played = play_episodes(config, player, episodes, seed)
    for number, rows in enumerate(tqdm(played, "record", episodes, unit="episode")):
        after = rows["next"]
        observation, snapshot = (
            torch.cat([rows[name], after[name][-1:]]).numpy() for name in ("observation", "snapshot")
        )
        success = after["success"].reshape(-1).numpy()
        write_episode(
            folder / f"episode-{number:05d}.npz",
            observation=observation,
            snapshot=snapshot,
            action=rows["action"].numpy(),
            reward=after["reward"].reshape(-1).numpy(),
            success=success,
            terminated=bool(after["terminated"][-1]),
        )
        successes += bool(success.any())
    replace(recording, complete=True).write(folder)
    log.info("%d episodes in %s, %d of them successful", episodes, folder, successes)
    return 0


def play_episodes(config: EnvConfig, make_player: MakePlayer, episodes: int, seed: int) -> Iterator[TensorDict]:
    """Plays whole episodes, the same number in every instance, so that short ones are not preferred.

    Args:
        config: the environment.
        make_player: who plays.
        episodes: how many.
        seed: of levels and actions.

    Yields:
        One-step rows ``[T]`` of each episode.

    Raises:
        ValueError: an episode does not end.
    """
    env_seed, player_seed = np.random.SeedSequence(seed).generate_state(2).tolist()
    count = min(config.num_envs, episodes)
    env = make_env(config, num_envs=count, seed=env_seed)
    player = make_player(env, player_seed)
    missing = np.diff(np.linspace(0, episodes, count + 1).astype(np.int64))  # of each instance
    running: list[list[TensorDict]] = [[] for _ in range(count)]
    try:
        root = env.reset()
        while missing.any():
            with torch.no_grad():
                step, root = env.step_and_maybe_reset(root.set("action", player(root)))
            ended = step["next", "done"].reshape(-1).tolist()
            for row in np.flatnonzero(missing).tolist():
                running[row].append(step[row])
                if ended[row]:
                    yield torch.stack(running[row])
                    running[row] = []
                    missing[row] -= 1
                config.check_length(len(running[row]))
    finally:
        env.close()
