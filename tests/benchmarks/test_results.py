"""What is kept under benchmarks/results tells nothing of the machine's folders."""

from __future__ import annotations

import re

from benchmarks.fidelity import RESULT

FOLDER = re.compile(r"(?<![\w.])/(?:tmp|opt|work|root|home|mnt|var|usr)/")


def test_no_result_has_a_path_of_the_machine_that_made_it() -> None:
    """Not in a command, nor in what an engine said when it ended."""
    files = [path for path in sorted(RESULT.parent.rglob("*")) if path.is_file()]
    assert files
    assert FOLDER.search('File "/tmp/site/vllm/serial_utils.py"')
    found = {path.name: match[0] for path in files if (match := FOLDER.search(path.read_text(encoding="utf-8")))}
    assert not found
