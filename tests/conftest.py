from __future__ import annotations

import torch

# Small networks are fastest on one thread, and tests must not compete with each other for cores.
torch.set_num_threads(1)
