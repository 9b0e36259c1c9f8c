"""What a device is called: one set of names for Engine(device=), load(device=) and the commands' --device."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kpolicy import executors  # noqa: E402
from kpolicy.device_names import DeviceName, read_device  # noqa: E402
from kpolicy.engine import Engine  # noqa: E402
from kpolicy.errors import ConfigError  # noqa: E402
from kpolicy.executors.ascend import AscendExecutor  # noqa: E402
from kpolicy.executors.kunlun import KunlunExecutor  # noqa: E402
from kpolicy.executors.of_device import executor_on  # noqa: E402
from kpolicy.executors.xpu import XpuExecutor  # noqa: E402
from kpolicy.schemas import read_profile  # noqa: E402
from kpolicy.serving.load import load  # noqa: E402
from kpolicy.serving.served import serve_for  # noqa: E402
from tests.cli.conftest import Command  # noqa: E402
from tests.executors_ascend.helpers import on_ascend  # noqa: E402
from tests.executors_kunlun.test_operators import on_card  # noqa: E402
from tests.fakes.torch_xpu import fake_xpu  # noqa: E402
from tests.real_run.helpers import TINY  # noqa: E402
from tests.real_run.test_command import SMALL, checkpoint, config, kpolicy, requests  # noqa: E402, F401


@pytest.mark.parametrize(
    ("device", "executor", "of_torch"),
    [
        ("auto", "auto", "auto"), ("cpu", "cpu", "cpu"), ("cuda", "cuda", "cuda"), ("cuda:1", "cuda", "cuda:1"),
        ("ascend", "ascend", "npu"), ("ascend:3", "ascend", "npu:3"), ("npu:3", "ascend", "npu:3"),
        ("kunlun:0", "kunlun", "cuda:0"), ("xpu:12", "xpu", "xpu:12"),
        ("accelerator:1", "accelerator", "accelerator:1"), ("musa:2", "musa", "musa:2"),
        ("auto:1", "auto:1", "auto:1"), ("cuda:x", "cuda:x", "cuda:x"),
        (torch.device("cuda", 1), "cuda", "cuda:1"),
    ],
)  # fmt: skip
def test_names(device: Any, executor: str, of_torch: str) -> None:
    """An executor's name, torch's, and one of several; others stay as they are, for whoever says what there is."""
    name = read_device(device)
    assert (name.executor, name.torch) == (executor, of_torch)


def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The models that executors were made for, by the executor's name."""
    models: dict[str, Any] = {}

    def get_executor(name: str, *, model: Any, **_: Any) -> Any:
        models[name] = model
        return SimpleNamespace(name=name)

    monkeypatch.setattr(import_module("kpolicy.executors.of_device"), "get_executor", get_executor)
    return models


@pytest.mark.parametrize(
    ("device", "at", "executor"),
    [("cuda:1", "cuda:1", "cuda"), ("cuda", "cuda:1", "cuda"), ("kunlun:1", "cuda:1", "kunlun"),
     ("npu:0", "npu:0", "ascend"), ("ascend", "npu:5", "ascend"), ("xpu:2", "xpu:2", "xpu")],
)  # fmt: skip
def test_an_engine_takes_the_names_that_load_takes(
    device: str, at: str, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number says which of several the model is on; the executor runs it there."""
    models, model = made(monkeypatch), SimpleNamespace(device=at)
    assert executor_on(model, device, None)[0].name == executor
    assert models == {executor: model}


@pytest.mark.parametrize("at", ["cuda:0", "cuda", None])
def test_a_model_on_another_one_is_refused(at: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor goes by where the model is, so another number would be passed over without a word."""
    models = made(monkeypatch)
    with pytest.raises(ConfigError, match=r"device is 'cuda:1', and the model .* Load it with device='cuda:1'"):
        executor_on(SimpleNamespace(device=at), "cuda:1", None)
    assert not models


def test_load_and_engine_go_by_them() -> None:
    """A device by its executor's name is asked of torch by torch's; of a model on the CPU its own name is taken."""
    for device in ("ascend", "npu:1", "xpu:1", "accelerator", "cpu:3"):
        with pytest.raises(ConfigError, match=f"device '{device}' isn't there"):
            load(TINY, device=device)
    model = load(TINY, num_blocks=8, block_size=4)
    engine = Engine(model=model, device=model.device, calibrate=0)
    assert engine.executor is not None
    assert engine.executor.name == "cpu"
    for device in ("cpu:0", torch.device("cpu", 0)):  # torch's own names of the one CPU
        assert load(TINY, num_blocks=8, block_size=4, device=device).device.type == "cpu"
        assert Engine(model=model, device=device, calibrate=0).executor is not None
    for device in ("auto:1", "cpu:3"):
        with pytest.raises(ConfigError, match=f"unknown executor '{device}'"):
            Engine(model=model, device=device)


PRETENDED = {
    "ascend": (AscendExecutor, "npu", lambda model: {"library": on_ascend(model)[1]}),
    "kunlun": (KunlunExecutor, "cuda", lambda model: on_card(model, reads="device")[1]),
    "xpu": (XpuExecutor, "xpu", lambda _: {"library": fake_xpu()}),
}


@pytest.fixture
def pretended(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    """A vendor's device over the CPU: what load was asked for, and the executors that were made."""
    make, _, options_of = PRETENDED[request.param]
    options: dict[str, Any] = {}
    asked: dict[str, Any] = {"name": request.param, "devices": [], "executors": []}

    def on_cpu(source: Any, *, device: str, dtype: Any = None, **arguments: Any) -> Any:
        asked["devices"].append(device)
        model = load(source, device="cpu", **arguments)
        options.update(options_of(model))
        return model

    def executor(*, model: Any, **arguments: Any) -> Any:
        asked["executors"].append(make(model, **arguments, **options))
        return asked["executors"][-1]

    monkeypatch.setattr(import_module("kpolicy.serving.real_run"), "load", on_cpu)
    monkeypatch.setattr(import_module("kpolicy.serving.real_run"), "device_there", lambda device: device)
    monkeypatch.setattr(executors, "_factory", lambda name: {request.param: executor}[name])
    return asked


@pytest.mark.parametrize("pretended", PRETENDED, indirect=True)
def test_run_serves_on_a_vendors_device(
    pretended: Mapping[str, Any], kpolicy: Command, config: Path, requests: Path  # noqa: F811
) -> None:  # fmt: skip
    """By its executor's name, with what a GPU has for defaults; every compared step is EAGER's."""
    name, kind = pretended["name"], PRETENDED[pretended["name"]][1]
    ended = kpolicy(
        "run", "--device", f"{name}:1", "--model", config, "--trace", requests, "--policy", "piecewise", "--json",
        "--max-num-reqs", 4, "--max-num-tokens", 32, "--kv-tokens", 512, "--ladder", "8,32",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert pretended["devices"] == [f"{name}:1"]
    assert read_device(f"{name}:1").torch == f"{kind}:1"
    assert [type(each) for each in pretended["executors"]] == [PRETENDED[name][0]]
    assert "piecewise" in ended.json["policies"][0]["verified"]


@pytest.mark.parametrize("pretended", PRETENDED, indirect=True)
def test_calibrate_measures_on_a_vendors_device(
    pretended: Mapping[str, Any], kpolicy: Command, config: Path, tmp_path: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By the same name, with the same executor; what it takes to serve there is in the profile."""
    name = pretended["name"]
    out = tmp_path / "p.json"
    monkeypatch.setattr(import_module("kpolicy.serving.served"), "serve_for", partial(serve_for, seconds=0.2))
    ended = kpolicy(
        "calibrate", "--device", name, "--model", config, "--out", out, "--seconds", 0.5, "--max-num-reqs", 4,
        "--max-num-tokens", 16, "--kv-tokens", 512, "--ladder", "8,16", "--json",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert [type(each) for each in pretended["executors"]] == [PRETENDED[name][0]]
    served = read_profile(out).costs.served
    assert served is not None, ended.err
    assert served.scheduler_us > 0


@pytest.mark.parametrize("pretended", PRETENDED, indirect=True)
def test_generate_runs_on_a_vendors_device(
    pretended: Mapping[str, Any], kpolicy: Command, checkpoint: Path  # noqa: F811
) -> None:  # fmt: skip
    """By its executor's name and number; the tokens are those of transformers' generate."""
    name = pretended["name"]
    given = ("generate", "--model", checkpoint, "--prompt", "one two", "--max-tokens", 3, "--policy", "eager", "--json")
    ended = kpolicy(*given, "--device", f"{name}:1")
    assert ended.code == 0, ended.err
    assert pretended["devices"] == [f"{name}:1"]
    assert [type(each) for each in pretended["executors"]] == [PRETENDED[name][0]]
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    ids = transformers.AutoTokenizer.from_pretrained(checkpoint)("one two", return_tensors="pt")["input_ids"]
    tokens = reference.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert ended.json["completions"][0]["token_ids"] == tokens[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(("here", "size"), [("cpu", 256), ("npu", 2048), ("cuda", 2048), ("xpu", 2048)])
def test_auto_is_the_first_device_that_load_takes(here: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kind decides the defaults; which executor runs there is left to the executors."""
    run, run_model = import_module("kpolicy.cli.run"), import_module("kpolicy.cli.run_model")
    monkeypatch.setattr(import_module("kpolicy.serving.load"), "first_device", lambda: SimpleNamespace(type=here))
    assert run._device("auto", None) == DeviceName("auto", here)
    assert run_model.size_on(run._device("auto", None).kind).max_num_tokens == size


def test_auto_runs(kpolicy: Command, config: Path, requests: Path) -> None:  # noqa: F811
    """Here it is the CPU, unless there is more."""
    if torch.accelerator.is_available():
        pytest.skip("there is another device")
    given = ("--model", config, "--trace", requests, "--policy", "eager", "--no-verify", "--json")
    ended = kpolicy("run", "--device", "auto", *given, *SMALL)
    assert ended.code == 0, ended.err
    assert ended.json["setting"]["executor"] == "cpu"


def test_a_warning_of_ours_is_a_line_of_the_command(config: Path, tmp_path: Path) -> None:  # noqa: F811
    """Without file, line and code."""
    config.write_text(json.dumps({**TINY, "quantization_config": {"quant_method": "fp8"}, "hidden_act": "none such"}))
    command = [sys.executable, "-m", "kpolicy", "calibrate", "--device", "cpu", "--model", str(config)]
    ended = subprocess.run([*command, "--out", str(tmp_path / "p.json")], capture_output=True, text=True, check=False)
    warned, failed = ended.stderr.splitlines()
    assert warned.startswith("kpolicy: the config given is of quantized weights (fp8), and random weights are not:")
    assert "none such" in failed


@pytest.mark.parametrize("command", ["generate", "calibrate", "run"])
@pytest.mark.parametrize("written", ["{}", "no JSON", None])
def test_a_device_that_is_missing_is_told_first(
    command: str, written: str | None, kpolicy: Command, requests: Path, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    """With what brings it, whatever is wrong with the model: mending that would help nobody without the device."""
    if hasattr(torch, "npu"):
        pytest.skip("torch_npu is here")
    options = {
        "generate": ("--prompt", "one"), "calibrate": ("--out", tmp_path / "p.json"), "run": ("--trace", requests),
    }[command]  # fmt: skip
    model = tmp_path / "config.json"
    if written is not None:
        model.write_text(written)
    ended = kpolicy(command, "--device", "ascend", "--model", model, *options)
    assert (ended.code, ended.out) == (2, "")
    assert "device 'ascend' isn't there: torch has no such devices without torch_npu." in ended.err


@pytest.mark.parametrize("command", ["generate", "calibrate", "run"])
def test_the_help_has_every_device_of_ours(command: str, kpolicy: Command) -> None:  # noqa: F811
    """Those that an unknown name's error lists."""
    told = set(re.findall(r"\w+", kpolicy(command, "--help").out))
    assert {*executors.OWN} - {"simulated"} <= told
