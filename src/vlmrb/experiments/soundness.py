"""Whether `vlmrb fit` would take the settings of a study's runs, found out before the first of them starts.

`python -m vlmrb.experiments.soundness PARENT` is the process that reads them; it ends with PARENT.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from tempfile import TemporaryDirectory
from typing import Any

from vlmrb.early import require_sound
from vlmrb.experiments.cells import Cell
from vlmrb.experiments.child import stop_with

# Settings by which Lightning may end a run before its budget, or go on after it, and their values by which it does not.
WHOLE: dict[str, tuple[Any, ...]] = {
    "max_epochs": (1,),
    "max_steps": (-1,),
    "max_time": (None,),
    "limit_train_batches": (None,),
    "overfit_batches": (0.0,),
    "fast_dev_run": (False,),
}
Combination = tuple[str, str]  # the configuration's name and the scheme's label


def budgets(cells: Sequence[Cell]) -> dict[Combination, int]:
    """Reads the settings of each distinct combination of configuration and scheme as `vlmrb fit` would.

    What can be said without PyTorch is said first; for the rest, one process reads all of them.

    Returns:
        The env steps of each.

    Raises:
        ValueError: `vlmrb fit` would refuse some of them; all complaints, in one line.
    """
    distinct: dict[Combination, list[str]] = {}
    for cell in sorted(cells, key=lambda cell: cell.saved):  # runs go on without --prefill's folder
        more = ["--prefill", "null"] if cell.saved else []
        distinct.setdefault((cell.config.stem, cell.label), [*cell.arguments, *more])
    complaints = {combination: _early(arguments) for combination, arguments in distinct.items()}
    if not any(complaints.values()):
        answers = dict(zip(distinct, _read(list(distinct.values())), strict=True))
        complaints = {combination: answer.get("error", "") for combination, answer in answers.items()}
    where: dict[str, list[str]] = {}
    for (config, scheme), complaint in complaints.items():
        if complaint:
            where.setdefault(complaint, []).append(f"{scheme} on {config}")
    if where:
        listed = "; ".join(f"{complaint} (scheme {', '.join(who)})" for complaint, who in where.items())
        raise ValueError(f"nothing was started: {listed}")
    return {combination: answer["total_env_steps"] for combination, answer in answers.items()}


def _early(arguments: Sequence[str]) -> str:
    from vlmrb.cli import one_line

    try:
        require_sound(arguments)
    except Exception as error:  # whatever a setting's own code raises
        return one_line(error)
    return ""


def _read(combinations: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Lets a process read settings that then ends, and with it PyTorch's several hundred MB."""
    command = [sys.executable, "-m", "vlmrb.experiments.soundness", str(os.getpid())]
    answer = subprocess.run(command, input=json.dumps(combinations), capture_output=True, text=True)
    if answer.returncode:
        said = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
        raise RuntimeError(f"settings could not be read: {said[-1]}")
    return json.loads(answer.stdout)


def require_whole_budget(trainer: Mapping[str, Any]) -> None:
    """Refuses settings of the trainer that end a run elsewhere than at its budget, so that it never counts as finished.

    Args:
        trainer: the section ``trainer`` of `vlmrb fit`.

    Raises:
        ValueError: naming the setting.
    """
    for name, whole in WHOLE.items():
        if name in trainer and trainer[name] not in whole:
            raise ValueError(
                f"trainer.{name}={trainer[name]!r} has no place in a study: runs end with training.total_env_steps"
            )


def read_settings(arguments: Sequence[str]) -> int:
    """Builds all that settings name, as `vlmrb fit` does before it takes a folder or makes an environment.

    Args:
        arguments: those of `vlmrb fit`.

    Returns:
        Env steps of the run.

    Raises:
        Exception: as `vlmrb fit` would.
    """
    from vlmrb.algorithms.base import OffPolicyModule, require_one_device
    from vlmrb.callbacks.prefill import PrefillCallback
    from vlmrb.fit import CLI_SETTINGS, FitCLI

    class SettingsCLI(FitCLI):
        """Stops where `fit` would make an environment."""

        def instantiate_trainer(self, **kwargs: Any) -> Any:
            """Builds none: the node where the run will be may have other devices."""
            trainer = self.config["fit"]["trainer"]
            require_whole_budget(trainer)
            if self.config["fit"]["prefill"] is not None:
                PrefillCallback(self.config["fit"]["prefill"])
            if str(trainer["devices"]).isdecimal():
                require_one_device(int(trainer["devices"]) * trainer["num_nodes"])

        def _run_subcommand(self, subcommand: str) -> None:
            scoring = self.config_init["fit"]["scoring"]
            scoring.setup(self.trainer, self.model, "fit")

    with TemporaryDirectory(prefix="vlmrb-settings-") as run_dir, ExitStack() as locks:
        args = ["fit", *arguments, "--run_dir", run_dir]
        cli = SettingsCLI(OffPolicyModule, locks=locks, args=args, **CLI_SETTINGS)
    return cli.config["fit"]["training"]["total_env_steps"]


def main() -> None:
    """Reads lists of arguments from stdin and answers on stdout, both JSON."""
    stop_with(int(sys.argv[1]))
    from vlmrb.cli import one_line
    from vlmrb.fit import quieten

    quieten()
    answers: list[dict[str, Any]] = []
    with redirect_stdout(sys.stderr):  # scorers may print what they like
        for arguments in json.load(sys.stdin):
            try:
                answers.append({"total_env_steps": read_settings(arguments)})
            except Exception as error:  # whatever settings and foreign classes raise
                answers.append({"error": one_line(error)})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
