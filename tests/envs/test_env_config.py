"""Settings and the registry of families."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import pytest

from vlmrb.envs import EnvConfig, make_env, make_renderer, register, registry


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "MiniGrid-DorKey-6x6-v0"}, r"env.id .* is unknown; did you mean MiniGrid-DoorKey-6x6-v0"),
        ({"id": ""}, "env.id '' names no environment: set it to a MiniGrid id such as MiniGrid-DoorKey-6x6-v0"),
        ({"id": "json:"}, "env.id 'json:' names no environment"),
        ({"id": "xyz"}, "env.id 'xyz' is unknown$"),
        ({"id": "no_such_module:World-v0"}, "cannot import 'no_such_module'"),
        ({"id": "MiniGrid-DoorKey-4x4-v0"}, "DoorKey needs 5 to 255 cells"),
        ({"id": "MiniGrid-DoorKey-6x8-v0"}, "is no DoorKey of the form MiniGrid-DoorKey-NxN-v0"),
        ({"num_envs": 0}, "env.num_envs must be at least 1, got 0"),
        ({"tile_size": 0}, "env.tile_size"),
        ({"frame_size": 0}, "env.frame_size"),
        ({"max_steps": 0}, "env.max_steps"),
        ({"visuals": "pretty"}, "env.visuals must be standard, misleading or abstract, got 'pretty'"),
        ({"id": "CartPole-v1", "visuals": "abstract"}, "env.visuals 'abstract' exists for MiniGrid ids only"),
        ({"id": "CartPole-v1", "workers": -1}, "env.workers must be between 0 and num_envs"),
        ({"id": "CartPole-v1", "workers": 33}, "env.workers must be between 0 and num_envs = 32, got 33"),
        ({"worker_timeout_s": 0.0}, "env.worker_timeout_s=0.0 must be positive and finite"),
        ({"worker_timeout_s": float("nan")}, "env.worker_timeout_s=nan must be positive and finite"),
        ({"workers": 2}, "env.workers = 2: DoorKey is stepped as one batch"),
        ({"actions": [2]}, "env.actions must be two or more different action numbers from 0 on, got"),
        ({"actions": [1, 1]}, "env.actions must be two or more"),
        ({"actions": [-1, 2]}, "env.actions must be two or more"),
        ({"wrappers": [{"init_args": {}}]}, "env.wrappers holds class paths or {class_path, init_args}, got"),
        ({"render_quality": "full"}, "env.render_quality does nothing for 'MiniGrid-DoorKey-6x6-v0': leave it out"),
        ({"kwargs": {"size": 7}}, "env.kwargs does nothing for 'MiniGrid-DoorKey-6x6-v0': leave it out"),
        ({"success": "reached"}, "env.success must look like package.module:function"),
    ],
)
def test_a_bad_setting_is_named_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        EnvConfig(**settings)
    assert "\n" not in str(error.value)


def test_upstreams_horizon_is_the_default_and_ours_replaces_it() -> None:
    for size in (5, 8, 12):
        config = EnvConfig(id=f"MiniGrid-DoorKey-{size}x{size}-v0", num_envs=2)
        assert make_env(config).simulator.max_steps == 10 * size**2
    assert make_env(EnvConfig(max_steps=7)).simulator.max_steps == 7


def test_number_of_instances_is_the_configs_unless_asked_otherwise() -> None:
    config = EnvConfig(num_envs=5)
    assert make_env(config).batch_size == (5,)
    assert make_env(config, num_envs=2).batch_size == (2,)
    with pytest.raises(ValueError, match="num_envs"):
        make_env(config, num_envs=0)


def test_an_own_family_is_one_module_with_a_few_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", [])
    family = types.ModuleType("my_world")
    family.claims = lambda env_id: env_id.startswith("MyWorld")
    family.check = lambda config: None
    family.make_env = lambda config, num_envs, seed: ("env", config.id, num_envs, seed)
    family.make_renderer = lambda config: ("renderer", config.id)
    monkeypatch.setitem(sys.modules, "my_world", family)
    register(family)
    config = EnvConfig(id="my_world:MyWorld-v0")
    assert make_env(config, seed=3) == ("env", "my_world:MyWorld-v0", 32, 3)
    assert make_renderer(config) == ("renderer", "my_world:MyWorld-v0")
    assert EnvConfig().id.startswith("MiniGrid")  # the others are still there


def test_settings_and_renderers_need_no_torch() -> None:
    code = (
        "import sys\n"
        "from vlmrb.envs import EnvConfig, make_renderer\n"
        "assert not {'torch', 'gymnasium'} & set(sys.modules)\n"
        "make_renderer(EnvConfig()); make_renderer(EnvConfig(id='MiniGrid-Empty-5x5-v0'))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
