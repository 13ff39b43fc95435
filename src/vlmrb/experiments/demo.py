"""`vlmrb demo`: VLM-RB beside uniform replay on DoorKey-6×6, in about five minutes on two cores."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from vlmrb.experiments.cells import Cell, Scheme, last_lines
from vlmrb.experiments.children import Children

CONFIG = Path("configs/quickstart.yaml")
SCHEMES = (
    Scheme("VLM-RB (sprites)", ("configs/replay/vlm.yaml",)),
    Scheme("uniform replay", ("configs/replay/uniform.yaml",)),
)


def demo(seed: int = 0, out: str = "runs/demo", overrides: Sequence[str] = ()) -> int:
    """Trains DQN with VLM-RB and with uniform replay, same seed and budget, and draws both learning curves.

    The scorer is the embedded sprite recogniser, a hand-made stand-in for a vision-language model.

    Args:
        seed: of both runs.
        out: folder of the VLM-RB run; the uniform run goes into ``uniform/`` below it.
        overrides: further `vlmrb fit` options for both runs.
    """
    from vlmrb.experiments.results import curve_of
    from vlmrb.plots import plot_learning_curves

    folder = Path(out)
    folders = [folder, folder / "uniform"]
    cells = [
        Cell(CONFIG, scheme, seed, run_dir, tuple(overrides)) for scheme, run_dir in zip(SCHEMES, folders, strict=True)
    ]
    commands = [[*cell.command[1:], "--resume", "false", "--overwrite", "true"] for cell in cells]
    print(f"DQN on DoorKey-6x6 with VLM-RB (shown) and with uniform replay (log in {folders[1]}/log.txt), seed {seed}")
    sys.stdout.flush()
    # The first run makes room for itself before the second writes below it.
    if folder.exists():
        _move_aside(folder)
    folders[1].mkdir(parents=True)
    with (folders[1] / "log.txt").open("w") as log, Children() as children:
        children.start(commands[1], log)
        shown = children.start(commands[0])
        failed = []
        while ended := children.wait():
            failed += [child for child in ended if child.returncode != 0]
            if failed:
                children.stop()  # one curve alone compares nothing
    if children.signal is not None:
        print(f"interrupted; what there is lies in {folder}", file=sys.stderr)
        return children.exit_code
    if failed:
        reason = (
            "see above" if failed[0] is shown else f"{last_lines(folders[1] / 'log.txt', 1)[0]} ({folders[1]}/log.txt)"
        )
        print(f"the {'VLM-RB' if failed[0] is shown else 'uniform'} run failed: {reason}", file=sys.stderr)
        return 1
    summary, uniform = (json.loads((run_dir / "summary.json").read_text()) for run_dir in folders)
    plot_learning_curves(
        {cell.label: [curve_of(cell)] for cell in cells},
        folder / "curves.png",
        title=summary["env"],
    )
    print(
        f"""
VLM-RB:  success {summary["success"]:.2f} (mean of the last three evaluations), best {summary["best_success"]:.2f}
uniform: success {uniform["success"]:.2f}, best {uniform["best_success"]:.2f}
{summary["env_steps"]:,} env steps each, {summary["wall_s"]:.0f} s

learning curves   {folder}/curves.png
scored clips      {folder}/clips/*.gif
all numbers       {folder}/summary.json, evaluations.csv, metrics.csv
TensorBoard       .venv/bin/tensorboard --logdir {folder}"""
    )
    return 0


def _move_aside(folder: Path) -> None:
    number = next(n for n in range(1, 10_000) if not folder.with_name(f"{folder.name}.old{n}").exists())
    folder.rename(folder.with_name(f"{folder.name}.old{number}"))
