"""What a student takes of the machine, told before a run."""

from __future__ import annotations

from vlmrb.doctor import GIB, Check
from vlmrb.scoring.config import ScoringConfig
from vlmrb.scoring.student.memory import MEMORY_MB

PROCESS_BYTES = 544 << 20  # of a process that has loaded Python and PyTorch (Linux's VmRSS); parts of it are shared
MEMORY_BYTES = 2 * MEMORY_MB << 20  # of the clips that it remembers, at most


def student_check(config: ScoringConfig, free_bytes: int, cores: int) -> Check:
    """Is there memory for a student, and a processor core beside the learner's?

    Nothing is promised of what it may save: the scorer's speed is judged as if every clip were shown to it.

    Args:
        config: with a student.
        free_bytes: of memory.
        cores: of the processor.
    """
    name, own = "student", config.backend == "process"
    least = PROCESS_BYTES if own else 0
    where = {"process": "a process of its own", "thread": "a thread of training's process", "sync": "part of training"}
    found = (
        f"{where[config.backend]} with {least / GIB:.1f} to {(least + MEMORY_BYTES) / GIB:.1f} GiB of memory "
        f"({free_bytes / GIB:.1f} GiB free) and at most one of {cores} core{'s' if cores > 1 else ''}"
        f"{', where it gives way' if own else ''}; what the scorer has to do is reckoned without it"
    )
    if least + MEMORY_BYTES > free_bytes:
        return Check(name, "warn", found, "lower scoring.student.memory_clips, or stop what else runs here")
    if own and cores < 2:
        return Check(name, "warn", found, "its clips will wait for it: lower scoring.student.steps_per_clip")
    return Check(name, "ok", found)
