"""What to paste or to save for a run: an engine's flags, or a plan file and the code that reads it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kpolicy import __version__
from kpolicy.engine_flags import emit, engine_of
from kpolicy.report.runs import Planned, Run
from kpolicy.schemas import dumps
from kpolicy.simulate import Server

__all__ = ["Paste", "paste_for_kpolicy", "paste_of"]


@attrs.frozen(kw_only=True)
class Paste:
    """Something to paste or to save.

    Args:
        title: what it is for.
        how: what to do with it.
        text: the flags, the file or the code.
        file_name: what to call it where it is a file; empty where it is pasted.
        warnings: where an engine won't do as asked.
    """

    title: str
    how: str
    text: str
    file_name: str = ""
    warnings: tuple[str, ...] = ()


def paste_of(run: Run, server: Server) -> list[Paste]:
    """The flags of the run's engine; nothing where it has none or captures nothing."""
    engine, sizes = engine_of(run.policy), run.sizes
    if engine is None or not (sizes.decode or sizes.mixed or sizes.piecewise):
        return []
    made = emit(engine, sizes, server.settings, policy=run.policy)
    return [
        Paste(
            title=f"For {engine}",
            how=made.how,
            text=made.text,
            file_name="extra.yaml" if made.file else "",
            warnings=made.warnings,
        )
    ]


def paste_for_kpolicy(run: Run, plans: Sequence[Planned]) -> list[Paste]:
    """For one of kpolicy's own policies: how an Engine is made, and the plan file it reads."""
    plan = next((plan for plan in plans if plan.run is run), None)
    if plan is None:
        given = f", ladder={run.sizes!r}" if run.kind == "given" else ""
        return [Paste(title="For kpolicy", how="make the Engine so", text=f"Engine(policy={run.policy!r}{given})")]
    code = (
        "from kpolicy import Engine\nfrom kpolicy.schemas import read_plan\n\n"
        'plan = read_plan("plan.json")\n'
        f"engine = Engine(policy={run.policy!r}, ladder=plan.sizes, settings=plan.settings, attention=plan.attention)"
    )
    return [
        Paste(
            title="For kpolicy", how="save the plan file, and make the Engine so; or give both to kpolicy run: "
            f"--policy {run.policy} --ladder plan.json", text=code,
        ),
        Paste(
            title="The plan file", how="save as plan.json", file_name="plan.json",
            text=dumps(plan.found.file(plan.budget, kpolicy=__version__)),
        ),
    ]  # fmt: skip
