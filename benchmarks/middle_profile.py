"""Of several profiles of one model, the one whose host was in the middle.

``python -m benchmarks.middle_profile P1 P2 P3 --out P``. A virtual machine's host is slow or quick for as long as a
calibration takes, and the fixed work noted beside each sample (`kpolicy.host_speed`) doesn't tell all of it: of five
tables of one model on H200s' hosts one had launches 18% slower than the quickest, and one 8% (docs/benchmarks.md). So
calibrate several times, in processes of their own, and serve by the middle one of what they took for launching an
eager prompt and a decode in pieces, brought to one host speed; of an even number, by the quicker of the two there.
The quickest is as far from what serving meets as the slowest: by it EAGER steps came out 8% too quick, by the middle
one 4%.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median_low

from kpolicy.costs import CostTable
from kpolicy.errors import KPolicyError, ProfileError
from kpolicy.schemas import Profile, read_profile


def launching_us(costs: CostTable, work_us: float) -> float:
    """Microseconds of the host for an eager prompt and a decode in pieces, where the fixed work takes so long."""
    costs = costs.at_host_speed(work_us)
    return costs.host_eager.base_for(decodes=False, prefills=True) + costs.host_piecewise.base_for(
        decodes=True, prefills=False
    )


def middle(profiles: Sequence[Profile]) -> tuple[int, list[float]]:
    """The index of the one in the middle, and what each takes for launching at the first one's host speed.

    Raises:
        ProfileError: they aren't of one model and device, or one doesn't note its host's speed.
    """
    first = profiles[0]
    for i, profile in enumerate(profiles):
        if (profile.device, profile.model) != (first.device, first.model):
            raise ProfileError(
                f"profile {i + 1} is of {profile.model} on {profile.device}, the first of {first.model} on "
                f"{first.device}; give profiles of one model on one device."
            )
        if not profile.costs.host_work_us:
            raise ProfileError(f"profile {i + 1} has no host_work_us; calibrate again, on a GPU, by this version.")
    times = [launching_us(profile.costs, first.costs.host_work_us) for profile in profiles]
    return times.index(median_low(times)), times


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", type=Path, nargs="+", help="profiles of one model, by `kpolicy calibrate`")
    parser.add_argument("--out", type=Path, required=True, help="where the one in the middle is copied to")
    arguments = parser.parse_args(argv)
    if any(arguments.out.resolve() == path.resolve() for path in arguments.profiles):
        parser.error(f"--out {arguments.out} is one of the profiles, which would be lost; name another file")
    try:
        chosen, times = middle([read_profile(path) for path in arguments.profiles])
        shutil.copyfile(arguments.profiles[chosen], arguments.out)
    except (KPolicyError, OSError) as error:
        sys.stderr.write(f"benchmarks.middle_profile: {error}\n")
        return 2
    for i, (path, us) in enumerate(zip(arguments.profiles, times, strict=True)):
        print(f"{path}: {us:,.0f} us, {us / times[chosen]:.2f} of the middle one{', taken' if i == chosen else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
