"""Environments: one file per family, each a batch of instances that can be drawn again from small snapshots.

Your own environment needs no code here if Gymnasium can make it: put ``gymnasium.register(...)`` into a module of yours
and name both in the config, ``id: my_package.my_module:MyWorld-v0``. It must offer ``rgb_array`` frames. A family with
its own snapshots and renderer is one module with four functions, see :mod:`vlmrb.envs.registry`.

Importing this package loads neither torch nor Gymnasium; making an environment does.
"""

from vlmrb.envs.config import EnvConfig
from vlmrb.envs.registry import make_env, make_goals, make_renderer, register

__all__ = ["EnvConfig", "make_env", "make_goals", "make_renderer", "register"]
