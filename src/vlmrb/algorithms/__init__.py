"""One LightningModule per algorithm; `OffPolicyModule` is the loop that they share.

Importing this package does not load torch, so that settings can be judged without; using one of its names does.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmrb.algorithms.base import OffPolicyModule
    from vlmrb.algorithms.config import TrainingConfig
    from vlmrb.algorithms.dqn import DQN
    from vlmrb.algorithms.iqn import IQN
    from vlmrb.algorithms.sac import SAC
    from vlmrb.algorithms.td3 import TD3

__all__ = ["DQN", "IQN", "SAC", "TD3", "OffPolicyModule", "TrainingConfig"]

_MODULES = {"OffPolicyModule": "base", "TrainingConfig": "config", **{name: name.lower() for name in __all__[:4]}}


def __getattr__(name: str) -> Any:
    """Loads what is asked for."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
