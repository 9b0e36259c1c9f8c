"""What importing kpolicy loads, and what it doesn't need."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import kpolicy
from kpolicy import executors, policies

ROOT = Path(__file__).parent.parent.parent

WITHOUT_DEVICE_LIBRARIES = """
import sys
for name in ("torch", "torch_npu", "torch_xmlir", "vllm", "sglang", "transformers", "structlog"):
    sys.modules[name] = None
from kpolicy import BatchShape, Engine
from kpolicy.executors.simulated import SimulatedExecutor
from kpolicy.scheduling.batching import Batcher, Generation
engine = Engine(policy="auto", executor="simulated")
engine.capture()
batcher = Batcher(engine.settings, num_blocks=64)
batcher.add(Generation(0, [1, 2, 3], 2))
batch = batcher.next_batch()
print(engine.step(batch.inputs).decision.label)
"""

FIRST_DECISION = """
import sys, json
from kpolicy import BatchShape, Engine
label = Engine(policy="auto").decide(BatchShape.decode(9)).label
print(json.dumps([label, sorted(name for name in sys.modules if "." not in name)]))
"""


DECIDING_WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import kpolicy.executors.simulated
from kpolicy import BatchShape, Engine
print(Engine(policy="auto").explain(BatchShape.decode(9)).decision.label)
"""


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_core_and_simulated_executor_need_no_device_library():
    """A fresh interpreter decides, captures and steps with torch and structlog made unimportable."""
    assert python(WITHOUT_DEVICE_LIBRARIES).strip() in {"full", "piecewise", "eager"}


def test_deciding_and_explaining_need_no_numpy():
    """Decisions and explanations are made with numpy made unimportable; only simulated steps compute with it."""
    assert python(DECIDING_WITHOUT_NUMPY).strip() == "full"


def test_first_decision_loads_nothing_heavy():
    """Deciding loads no torch, numpy, structlog, cattrs, rich or cyclopts."""
    label, modules = json.loads(python(FIRST_DECISION))
    assert label == "full"
    assert not {"torch", "numpy", "structlog", "cattrs", "rich", "cyclopts", "hypothesis"} & set(modules)


@pytest.mark.parametrize("name", kpolicy.__all__)
def test_exported_names_are_there(name):
    """Everything in __all__ can be had from the package."""
    assert getattr(kpolicy, name) is not None
    assert name in dir(kpolicy)


def test_a_name_that_is_not_exported_is_an_attribute_error():
    """A misspelt name fails as any module's does."""
    with pytest.raises(AttributeError, match="Enginee"):
        _ = kpolicy.Enginee


def test_own_names_are_registered_as_entry_points():
    """pyproject.toml registers exactly what the packages find without a scan, so plugins use what ours use."""
    tomllib = pytest.importorskip("tomllib")  # in the standard library from 3.11 on
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points["kpolicy.policies"] == dict(policies.OWN)
    assert points["kpolicy.executors"] == dict(executors.OWN)


def test_modules_have_docstrings_and_sorted_exports():
    """Every module says what it is for."""
    missing = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "kpolicy").rglob("*.py")
        if not path.read_text().lstrip().startswith(('"""', 'r"""'))
    ]
    assert missing == []


def test_the_design_page_lists_the_layers_that_are_held():
    """docs/design.md's list of layers is pyproject.toml's, line by line."""
    tomllib = pytest.importorskip("tomllib")  # in the standard library from 3.11 on
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = "\n".join(next(each["layers"] for each in contracts if each["type"] == "layers"))
    assert f"```\n{layers}\n```" in (ROOT / "docs/design.md").read_text()
