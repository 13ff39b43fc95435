"""One LightningModule per algorithm; `OffPolicyModule` is the loop that they share."""

from vlmrb.algorithms.base import OffPolicyModule
from vlmrb.algorithms.config import TrainingConfig
from vlmrb.algorithms.dqn import DQN

__all__ = ["DQN", "OffPolicyModule", "TrainingConfig"]
