"""One LightningModule per algorithm; `OffPolicyModule` is the loop that they share."""

from vlmrb.algorithms.base import OffPolicyModule
from vlmrb.algorithms.config import TrainingConfig
from vlmrb.algorithms.dqn import DQN
from vlmrb.algorithms.iqn import IQN
from vlmrb.algorithms.sac import SAC
from vlmrb.algorithms.td3 import TD3

__all__ = ["DQN", "IQN", "SAC", "TD3", "OffPolicyModule", "TrainingConfig"]
