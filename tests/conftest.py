from __future__ import annotations

import signal

import torch

# Small networks are fastest on one thread, and tests must not compete with each other for cores.
torch.set_num_threads(1)

# A shell starts background jobs with Ctrl-C ignored; tests of Ctrl-C, and the programs they start, need it back.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
