"""`kpolicy.middle_profile` of profiles that are there: calibrations made one by one, as `benchmarks.quiet` needs.

``python -m benchmarks.middle_profile P1 P2 P3 --out P``.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import output_file
from kpolicy.errors import KPolicyError
from kpolicy.middle_profile import launching_us, middle
from kpolicy.schemas import read_profile, write_profile


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", type=Path, nargs="+", help="profiles of one model, by `kpolicy calibrate`")
    parser.add_argument("--out", type=output_file, required=True, help="where the profile of the middle is written")
    arguments = parser.parse_args(argv)
    if any(arguments.out.resolve() == path.resolve() for path in arguments.profiles):
        parser.error(f"--out {arguments.out} is one of the profiles, which would be lost; name another file")
    command = shlex.join(["python", "-m", "benchmarks.middle_profile", *map(str, arguments.profiles)])
    try:
        profiles = [read_profile(path) for path in arguments.profiles]
        made = middle(profiles, f"{command} --out {shlex.quote(str(arguments.out))}")
        write_profile(arguments.out, made)
    except (KPolicyError, OSError) as error:
        sys.stderr.write(f"benchmarks.middle_profile: {error}\n")
        return 2
    of_middle = launching_us(made.costs, made.costs)
    for path, profile in zip(arguments.profiles, profiles, strict=True):
        us = launching_us(profile.costs, made.costs)
        # A host that runs what it launches takes nothing to launch.
        beside = f", {us / of_middle:.2f} of the middle" if of_middle else ""
        print(f"{path}: {us:,.0f} us{beside}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
