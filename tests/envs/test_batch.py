"""What every environment of the package promises as a TorchRL environment, across automatic resets.

Executable form of the environment contract in docs/architecture.md:

- the keys, shapes and types of the table there, at the root and under ``next``;
- ``next`` at termination and at truncation is the true last state, and the following root is a new episode's first;
- rows go on unchanged where nothing ended;
- the short ``step_and_maybe_reset`` is TorchRL's own, key by key;
- a state dict holds all that the future depends on, and can be loaded with ``weights_only``.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, StepCounter, TransformedEnv
from torchrl.envs.utils import check_env_specs

from vlmrb.envs import EnvConfig, grid, make_env, make_renderer
from vlmrb.envs.batch import SimulatorEnv
from vlmrb.envs.doorkey import DoorKeySimulator
from vlmrb.envs.grid import GridLayout

DOORKEY = "MiniGrid-DoorKey-5x5-v0"
LAVA = "MiniGrid-DistShift1-v0"  # stepped by Gymnasium, terminates often


def _actions(seed: int, high: int = 7, n: int = 6) -> Callable[[TensorDictBase], TensorDictBase]:
    generator = torch.Generator().manual_seed(seed)

    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", torch.randint(0, high, (n,), generator=generator))

    return policy


@pytest.mark.parametrize("env_id", [DOORKEY, LAVA, "MiniGrid-KeyCorridorS3R1-v0", "CartPole-v1", "Pendulum-v1"])
def test_specs_hold_and_keys_are_those_of_the_contract(env_id: str) -> None:
    env = make_env(EnvConfig(id=env_id, num_envs=3, frame_size=16), seed=0)
    check_env_specs(env)
    root = env.reset()
    flags = {"success", "done", "terminated", "truncated"}
    assert set(root.keys()) == {"observation", "snapshot", *flags}
    after = env.step(env.rand_action(root))["next"]
    assert set(after.keys()) == {"observation", "snapshot", "reward", *flags}
    assert after["reward"].dtype == torch.float32
    assert after["reward"].shape == (3, 1)
    assert all(after[key].dtype == torch.bool and after[key].shape == (3, 1) for key in flags)
    assert after["snapshot"].dtype == torch.uint8
    assert after["snapshot"].ndim == 2
    action = root["action"]
    assert (action.dtype, action.ndim) == ((torch.float32, 2) if env_id == "Pendulum-v1" else (torch.int64, 1))
    env.close()


@pytest.mark.parametrize("env_id", [DOORKEY, LAVA])
def test_step_and_maybe_reset_equals_torchrls_own(env_id: str) -> None:
    config = EnvConfig(id=env_id, num_envs=6, max_steps=9)
    ours, stock = make_env(config, seed=4), make_env(config, seed=4)
    root, root_stock = ours.reset(), stock.reset()
    policy, policy_stock = _actions(1), _actions(1)
    ended = 0
    for _ in range(60):
        step, root = ours.step_and_maybe_reset(policy(root).set("extra", torch.ones(6)))
        step_stock, root_stock = EnvBase.step_and_maybe_reset(
            stock, policy_stock(root_stock).set("extra", torch.ones(6))
        )
        for ours_td, stock_td in ((step, step_stock), (root, root_stock)):
            # TorchRL leaves its reset mask behind, and zeros what the policy wrote where some rows but not all ended.
            stock_td = stock_td.exclude("_reset")
            assert set(ours_td.keys(True)) == set(stock_td.keys(True))
            theirs = stock_td.exclude("action", "extra")
            assert (ours_td.select(*theirs.keys(True, True)) == theirs).all()
        assert (root["action"] == step["action"]).all()
        assert (root["extra"] == 1).all()
        ended += int(step["next", "done"].sum())
    assert ended > 30


def test_partial_steps_are_left_to_torchrl() -> None:
    env = make_env(EnvConfig(id=DOORKEY, num_envs=2), seed=0)
    root = env.reset().set("action", torch.ones(2, dtype=torch.int64))
    root.set("_step", torch.zeros(2, dtype=torch.bool))
    step, _ = env.step_and_maybe_reset(root)
    assert (step["next", "snapshot"] == root["snapshot"]).all()


@pytest.mark.parametrize(("max_steps", "end"), [(7, "truncated"), (2000, "terminated")])
def test_collected_doorkey_transitions_are_true_across_resets(max_steps: int, end: str) -> None:
    config = EnvConfig(id=DOORKEY, num_envs=6, max_steps=max_steps)
    collector = Collector(make_env(config, seed=2), _actions(3), frames_per_batch=6 * 300, total_frames=6 * 900)
    replayed = DoorKeySimulator(5, 6, 10**9)
    last: TensorDict | None = None
    ended = 0
    age = np.zeros(6, np.int64)
    for batch in collector:
        for t in range(batch.shape[1]):
            row = batch[:, t]
            if last is not None:
                _check_follows(last, row)
            # From the root state the action leads to exactly `next`, whatever ended around it.
            replayed.set_states(np.arange(6), row["snapshot"].numpy(), np.zeros(6, np.int64))
            step = replayed.step(row["action"].numpy())
            age += 1
            np.testing.assert_array_equal(row["next", "snapshot"], step.snapshot)
            np.testing.assert_array_equal(row["next", "observation"], step.observation)
            np.testing.assert_array_equal(row["next", "terminated"][:, 0], step.terminated)
            np.testing.assert_array_equal(row["next", "success"][:, 0], step.success)
            np.testing.assert_array_equal(row["next", "truncated"][:, 0], age >= max_steps)
            assert (row["next", "reward"][:, 0].numpy() > 0).tolist() == step.success.tolist()
            age[row["next", "done"][:, 0].numpy()] = 0
            ended += int(row["next", end].sum())
            last = row
    collector.shutdown()
    assert ended > 0


def _check_follows(before: TensorDict, after: TensorDict) -> None:
    done = before["next", "done"][:, 0]
    assert (before["next", "done"] == (before["next", "terminated"] | before["next", "truncated"])).all()
    for key in ("observation", "snapshot"):
        assert (before["next", key][~done] == after[key][~done]).all()
    assert not any(after[key].any() for key in ("done", "terminated", "truncated", "success"))
    # Where an episode ended, a level begins: the key lies there, the door is locked, the hands are empty.
    begun = GridLayout(5, 5).unpack(after["snapshot"][done].numpy())
    kinds, states = begun.grid[..., 0], begun.grid[..., 2]
    assert (kinds == grid.KEY).any(axis=(1, 2)).all()
    assert ((kinds == grid.DOOR) & (states == grid.LOCKED)).any(axis=(1, 2)).all()
    assert not begun.carried.any()


def test_flags_of_the_following_root_are_no_alias_that_a_later_step_could_change() -> None:
    env = make_env(EnvConfig(id=DOORKEY, num_envs=6, max_steps=3), seed=2)
    policy, root = _actions(0), env.reset()
    history: list[tuple[TensorDictBase, TensorDictBase]] = []
    for _ in range(10):
        step, root = env.step_and_maybe_reset(policy(root))
        history.append((step, step.clone()))
    assert all((step == copy).all() for step, copy in history)


def test_transforms_see_the_same_environment() -> None:
    env = TransformedEnv(make_env(EnvConfig(id=DOORKEY, num_envs=4, max_steps=5), seed=0), StepCounter())
    rollout = env.rollout(12, break_when_any_done=False)
    assert (rollout["next", "truncated"][:, 4::5]).all()
    assert rollout["step_count"][:, :, 0].tolist() == [[0, 1, 2, 3, 4] * 2 + [0, 1]] * 4


def _play(env: EnvBase, root: TensorDictBase, policy: Callable[[TensorDictBase], TensorDictBase], steps: int) -> Any:
    rows = []
    for _ in range(steps):
        step, root = env.step_and_maybe_reset(policy(root))
        rows.append(step.clone())
    return torch.stack(rows), root


def _through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_doorkey_goes_on_exactly_where_its_state_was_saved_twice_in_a_row() -> None:
    config = EnvConfig(id=DOORKEY, num_envs=6, max_steps=30)
    env = make_env(config, seed=5)
    policy = _actions(6)
    _, root = _play(env, env.reset(), policy, 47)
    for restored_seed in (99, 100):
        state = _through_a_file(env.state_dict())
        restored = make_env(config, seed=restored_seed)
        restored.load_state_dict(state)
        assert restored.exact_resume
        assert (restored.current() == root.select(*restored.current().keys())).all()
        expected, root = _play(env, root, _actions(8), 80)
        got, root_got = _play(restored, restored.current(), _actions(8), 80)
        assert expected["next", "done"].sum() > 6  # the generator's state matters, too
        assert (expected == got).all()
        env, root = restored, root_got


def test_saving_does_not_disturb_and_the_saved_state_is_a_copy() -> None:
    env = make_env(EnvConfig(id=DOORKEY, num_envs=6), seed=5)
    root = env.reset()
    saved = env.state_dict()
    before = {key: value.clone() for key, value in saved.items() if isinstance(value, torch.Tensor)}
    _play(env, root, _actions(0), 20)
    assert all((saved[key] == value).all() for key, value in before.items())


def test_gymnasium_instances_begin_new_episodes_after_loading_the_same_every_time() -> None:
    config = EnvConfig(id=LAVA, num_envs=3, max_steps=8)
    env = make_env(config, seed=1)
    _play(env, env.reset(), _actions(0, n=3), 5)
    state = _through_a_file(env.state_dict())
    assert not env.exact_resume
    plays = []
    for seed in (0, 1):
        restored = make_env(config, seed=seed)
        restored.load_state_dict(state)
        plays.append(_play(restored, restored.current(), _actions(4, n=3), 20)[0])
    assert (plays[0] == plays[1]).all()
    assert plays[0]["next", "truncated"].any()


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (EnvConfig(id=DOORKEY, num_envs=2), EnvConfig(id=DOORKEY, num_envs=3)),
        (EnvConfig(id=DOORKEY, num_envs=2), EnvConfig(num_envs=2)),
        (EnvConfig(id=LAVA, num_envs=2), EnvConfig(id=LAVA, num_envs=3)),
    ],
)
def test_a_state_of_other_settings_is_refused(saved: EnvConfig, wanted: EnvConfig) -> None:
    state = make_env(saved, seed=0).state_dict()
    with pytest.raises(ValueError, match="keep env.id and env.num_envs"):
        make_env(wanted, seed=0).load_state_dict(state)


def test_a_state_of_another_schema_is_refused() -> None:
    env = make_env(EnvConfig(id=DOORKEY, num_envs=2), seed=0)
    with pytest.raises(ValueError, match="schema 0, this version reads 1"):
        env.load_state_dict({**env.state_dict(), "schema": 0})


def test_an_empty_state_as_torchrls_collectors_save_it_changes_nothing() -> None:
    env = make_env(EnvConfig(id=DOORKEY, num_envs=2), seed=0)
    before = env.current()
    env.load_state_dict({})
    assert (env.current() == before).all()


def test_set_seed_and_reset_repeat_the_levels() -> None:
    env = make_env(EnvConfig(id=DOORKEY, num_envs=4), seed=0)
    env.set_seed(11)
    first = env.reset()["snapshot"]
    second = env.reset()["snapshot"]
    env.set_seed(11)
    assert (env.reset()["snapshot"] == first).all()
    assert (first != second).any()


@pytest.mark.parametrize("visuals", ["misleading", "abstract"])
def test_looks_change_frames_and_nothing_else(visuals: Any) -> None:
    plain, other = EnvConfig(id=DOORKEY, num_envs=6), EnvConfig(id=DOORKEY, num_envs=6, visuals=visuals)
    plays = []
    for config in (plain, other):
        env = make_env(config, seed=0)
        plays.append(_play(env, env.reset(), _actions(1), 50)[0])
    assert (plays[0] == plays[1]).all()
    snapshots = plays[0]["snapshot"].numpy()
    assert (make_renderer(plain).render(snapshots) != make_renderer(other).render(snapshots)).any()


def test_the_renderer_reads_the_observations_off_the_snapshots() -> None:
    for env_id in (DOORKEY, LAVA):
        config = EnvConfig(id=env_id, num_envs=6)
        env = make_env(config, seed=0)
        play = _play(env, env.reset(), _actions(1), 30)[0]["next"]
        np.testing.assert_array_equal(make_renderer(config).observe(play["snapshot"].numpy()), play["observation"])


@pytest.mark.parametrize("env_id", [DOORKEY, LAVA])
def test_chosen_actions_are_counted_anew_and_do_what_they_did(env_id: str) -> None:
    chosen = [1, 2, 5]
    few = make_env(EnvConfig(id=env_id, num_envs=4, actions=chosen), seed=3)
    all_of_them = make_env(EnvConfig(id=env_id, num_envs=4), seed=3)
    assert few.action_spec[0].n == 3
    generator = torch.Generator().manual_seed(0)
    a, b = few.reset(), all_of_them.reset()
    for _ in range(60):
        action = torch.randint(0, 3, (4,), generator=generator)
        _, a = few.step_and_maybe_reset(a.set("action", action))
        _, b = all_of_them.step_and_maybe_reset(b.set("action", torch.tensor(chosen)[action]))
        assert torch.equal(a["observation"], b["observation"])
    few.close()
    all_of_them.close()


def test_native_actions_are_renumbered_and_an_unknown_one_is_refused() -> None:
    env = make_env(EnvConfig(id=DOORKEY, num_envs=2, actions=[0, 2, 5]), seed=0)
    assert isinstance(env, SimulatorEnv)
    assert env.renumber(np.array([5, 0])).tolist() == [2, 0]
    with pytest.raises(ValueError, match="leaves out an action"):
        env.renumber(np.array([5, 4]))


@pytest.mark.parametrize(("env_id", "has"), [(DOORKEY, "actions 0 to 6"), ("Pendulum-v1", "continuous actions")])
def test_actions_that_an_environment_lacks_are_refused(env_id: str, has: str) -> None:
    with pytest.raises(ValueError, match=has):
        make_env(EnvConfig(id=env_id, num_envs=2, actions=[0, 7]), seed=0)
