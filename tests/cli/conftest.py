"""The command in this process, and small files to give it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kpolicy.cli import main


class Ended(NamedTuple):
    """How a command ended: exit code, standard output, standard error."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Ended]


@pytest.fixture
def kpolicy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command: ``kpolicy("decide", "--decodes", 4)``; `run` on the simulated device where none is given."""
    for variable in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(variable, raising=False)

    def run(*arguments: object) -> Ended:
        given = [str(argument) for argument in arguments]
        if given[:1] == ["run"] and not {"--device", "--model", "--help"} & set(given):
            given[1:1] = ["--device", "simulated"]
        with pytest.raises(SystemExit) as ended:
            main(given)
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty requests of 8 to 300 prompt tokens and 1 to 12 to generate, a tenth of a second apart."""
    rows = [f"{100 * i},{8 + 73 * i % 293},{1 + 5 * i % 12}" for i in range(40)]
    return write(tmp_path / "trace.csv", "timestamp,input_length,output_length", *rows)


def write(path: Path, *lines: str) -> Path:
    """A file of these lines."""
    path.write_text("".join(f"{line}\n" for line in lines))
    return path
