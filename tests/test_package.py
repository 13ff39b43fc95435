from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import vlmrb

PACKAGE = Path(vlmrb.__file__).parent
BUILT_ON_AN_EXTRA = {"vlmrb.serving.app"}  # subclasses LitServe's classes; imported only by the process that serves
MODULES = sorted(
    {
        ".".join(("vlmrb", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for file in PACKAGE.rglob("*.py")
    }
    - BUILT_ON_AN_EXTRA
)
EXTRAS = ("transformers", "timm", "num2words", "litserve", "fastapi", "urllib3", "av", "ray")

# Imports each module alone, in a fork that has the heavy libraries already; writes {module: why it does not import}.
IMPORT_EACH = """
import importlib, importlib.machinery, json, os, sys, traceback

modules, extras, report = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]

class WithoutExtras(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in extras else super().find_spec(name, path, target)

# The heavy libraries look at installed metadata and load extras of ours that they find there: before these are hidden.
import lightning.pytorch.cli, minigrid, torchrl.collectors, torchrl.data, torchrl.objectives

for name in [name for name in sys.modules if name.partition(".")[0] in extras]:
    del sys.modules[name]
sys.meta_path = [WithoutExtras if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]

failures = {}
for module in modules:
    sys.stdout.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        error = ""
        try:
            importlib.import_module(module)
        except BaseException as caught:
            error = traceback.format_exception_only(caught)[-1].strip()
        sys.stdout.flush()
        os.write(writer, error.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        error = answer.read()
    os.waitpid(child, 0)
    if error:
        failures[module] = error
with open(report, "w") as file:
    json.dump(failures, file)
"""


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def imports(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What happened when each module was imported on its own, without extras, in an empty folder."""
    folder = tmp_path_factory.mktemp("imports")
    for name in ("work", "home"):
        (folder / name).mkdir()
    environment = os.environ | {
        "HOME": str(folder / "home"),
        "MPLCONFIGDIR": str(folder),  # matplotlib writes its font list at import
        "PYGAME_HIDE_SUPPORT_PROMPT": "1",  # pygame, below minigrid, greets at import
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", IMPORT_EACH, json.dumps(MODULES), json.dumps(EXTRAS), str(folder / "report")]
    done = subprocess.run(command, cwd=folder / "work", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {
        "failures": json.loads((folder / "report").read_text()),
        "printed": done.stdout,
        "files": [str(file.relative_to(folder)) for name in ("work", "home") for file in (folder / name).rglob("*")],
    }


def test_importing_the_package_takes_less_than_a_second_and_leaves_torch_out():
    code = "import sys, time; t = time.time(); import vlmrb; print(time.time() - t, 'torch' in sys.modules)"
    runs = [python(code).split() for _ in range(3)]
    assert min(float(seconds) for seconds, _ in runs) < 1.0
    assert {loaded for _, loaded in runs} == {"False"}


def test_the_version_is_the_installed_one():
    from importlib.metadata import version

    assert vlmrb.__version__ == version("vlmrb")


def test_every_folder_with_modules_is_a_package():
    folders = {file.parent for file in PACKAGE.rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


@pytest.mark.slow
def test_every_module_imports_on_its_own_without_any_extra_prints_nothing_and_writes_nothing(imports):
    assert imports == {"failures": {}, "printed": "", "files": []}
