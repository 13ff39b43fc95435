"""Is this installation fit to run? Questions that both the program and `vlmrb doctor` ask."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement


def core_requirements() -> list[Requirement]:
    """What the package needs in any case, as its installed metadata states it."""
    return [r for r in _requirements() if _applies(r, extra="")]


def extra_requirements(extra: str) -> list[Requirement]:
    """What the optional part `extra` needs on top."""
    return [r for r in _requirements() if _applies(r, extra=extra) and not _applies(r, extra="")]


def _requirements() -> list[Requirement]:
    return [Requirement(line) for line in requires("vlmrb") or []]


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def installed_version(distribution: str) -> str | None:
    """The installed version of a distribution, None where it is absent. Imports nothing."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def check_torchrl_abi() -> None:
    """Makes sure that torchrl's compiled segment trees work beside the installed torch.

    They load only beside the torch release they were built for, which torchrl's own metadata does not say; left to
    itself the mismatch shows as a warning at import and an obscure error when the first prioritised sampler is built.

    Raises:
        RuntimeError: in one line, naming both versions and the command that installs a fitting pair.
    """
    import torch  # noqa: F401 (torchrl's extension links against libraries that torch loads)

    try:
        from torchrl._torchrl import MinSegmentTreeFp32, SumSegmentTreeFp32, SumSegmentTreeFp64
    except ImportError as error:
        raise RuntimeError(_mismatch("do not load")) from error
    for tree, total in ((SumSegmentTreeFp32(3), 3.5), (SumSegmentTreeFp64(3), 3.5), (MinSegmentTreeFp32(3), 1.0)):
        tree[0], tree[2] = 1.0, 2.5
        if tree.query(0, 3) != total:
            raise RuntimeError(_mismatch("give wrong answers"))


def _mismatch(what: str) -> str:
    pair = [r for r in core_requirements() if r.name in ("torch", "torchrl", "tensordict")]
    install = " ".join(f"'{r}'" for r in pair)
    return (
        f"torchrl {installed_version('torchrl')} and torch {installed_version('torch')} do not match: "
        f"torchrl's compiled segment trees {what}. Install a fitting pair: pip install {install}"
    )
