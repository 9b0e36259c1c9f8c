"""Rows of further runs of SGLang beside those that are published."""

import json

import pytest

from benchmarks.sglang import publish
from benchmarks.sglang.publish import NAME, published

ABOUT = {"kind": "about", "device": "NVIDIA H200, 1", "commit": "a", "at": "today",
         "versions": {"sglang": "0.5.16", "kpolicy": "0.1.0", "torch": "2.11.0"}}  # fmt: skip


def row(run, load, ratio, figure="step ms"):
    return {"model": "m", "load": load, "figure": figure, "run": run, "ratio": ratio}


def result(*rows, runs=1, starts=(), **about):
    return {
        "what": "w", "command": "c", "runs": [{**ABOUT, "run": i + 1, **about} for i in range(runs)],
        "rows": list(rows), "earlier": [], "pooled": [], "apart": [], "checks": [], "logs": [], "errors": [],
        "starts": list(starts), "fewer": [row(1, "few", 1.0)],
    }  # fmt: skip


BEFORE = result(row(1, "decode", 0.98), row(2, "extend", 2.0), runs=2, starts=[{"run": 2, "init_s": 1.0}])
BEFORE["checks"].append({"run": 2, "passed": True})


def test_a_row_measured_again_takes_the_others_place():
    """Runs go on counting, the row that was there is among the earlier ones, and all else stays."""
    new = result(row(1, "decode", 1.01), row(1, "mixed", 3.0), starts=[{"run": 1, "init_s": 2.0}], commit="b")
    found = published(BEFORE, new)
    assert found["rows"] == [row(3, "decode", 1.01), row(2, "extend", 2.0), row(3, "mixed", 3.0)]
    assert found["earlier"] == [row(1, "decode", 0.98)]
    assert [(each["run"], each["commit"]) for each in found["runs"]] == [(1, "a"), (2, "a"), (3, "b")]
    assert [each["run"] for each in found["starts"]] == [2, 3]
    assert found["fewer"] == BEFORE["fewer"]
    assert BEFORE["rows"][0]["ratio"] == 0.98


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (result(device="NVIDIA H100, 1"), "runs of NVIDIA H100 can't stand beside those of NVIDIA H200"),
        (result(versions={"sglang": "0.5.23", "torch": "2.11.0"}), "'sglang': '0.5.23'"),
        (
            result(starts=[{"run": 1, "init_s": 5.0}, {"run": 2, "init_s": 1.0}]),
            "some of its starts are in the published",
        ),
        ({**result(), "checks": [{"run": 1, "passed": True}]}, "some of its checks are in the published file"),
        ({**result(), "pooled": [row(1, "decode", 1.0)]}, "it has pooled rows"),
    ],
)
def test_what_is_of_another_machine_or_there_already_is_refused(new, said):
    """Another GPU's rows in this file would be taken for this one's."""
    with pytest.raises(ValueError, match=said):
        published(BEFORE, new)


def test_another_driver_or_kpolicy_is_no_other_machine():
    """Both change from session to session, and each run says its own."""
    versions = {"sglang": "0.5.16", "kpolicy": "0.2.0", "torch": "2.11.0+cu130"}
    assert len(published(BEFORE, result(device="NVIDIA H200, 2", versions=versions))["runs"]) == 3


def test_the_file_is_written_whole_or_not_at_all(tmp_path, capsys):
    """What can't be published leaves the file as it was, with an error that says why."""
    for folder, content in (("out", result(row(1, "decode", 1.01))), ("results", BEFORE)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / NAME).write_text(json.dumps(content))
    command = [str(tmp_path / "out"), "--results", str(tmp_path / "results")]
    publish.main(command)
    written = (tmp_path / "results" / NAME).read_text()
    assert json.loads(written)["rows"][0]["ratio"] == 1.01
    (tmp_path / "out" / NAME).write_text("{")
    with pytest.raises(SystemExit):
        publish.main(command)
    assert "nothing was published" in capsys.readouterr().err
    assert (tmp_path / "results" / NAME).read_text() == written
