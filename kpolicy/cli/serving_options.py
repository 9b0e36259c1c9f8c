"""Options of the commands that simulate: which server serves, and by which costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs
from cyclopts import Parameter

from kpolicy.cli.options import PACE_HELP, Deployment, at_least, check_pace, settings_of, whole
from kpolicy.errors import ConfigError
from kpolicy.simulate import Drafts, Server, ServiceLevel
from kpolicy.simulate.cost_models import CostModel, cost_model
from kpolicy.simulate.server import LEAST_SLOWER, MOST_SLOWER

__all__ = ["KV_TOKENS", "Seed", "Served"]

_SERVER, _COSTS, _LEVEL = "Server", "Costs", "Service level"
MAX_NUM_TOKENS, KV_TOKENS = 2048, 400_000


Seed = Annotated[
    int,
    Parameter(
        converter=whole,
        help="Of accepted drafts, and of which of the profile's notes of the host's speed a simulation begins at; 0 is "
        "the first.",
    ),
]


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Served:
    """Options about the simulated server."""

    device: Annotated[
        str | None,
        Parameter(
            group=_COSTS,
            help="The device of analytic costs: H200 (the default), H100, A100, B200, Ascend-910B or Kunlun-P800.",
        ),
    ] = None
    tables: Annotated[
        str | None,
        Parameter(
            group=_COSTS,
            help="aiconfigurator takes that package's measured kernel tables for --config on --device; "
            "aiconfigurator:sglang those of SGLang's kernels.",
        ),
    ] = None
    max_num_tokens: Annotated[
        int, Parameter(group=_SERVER, converter=whole, help="Token budget of a step (chunked prefill).")
    ] = MAX_NUM_TOKENS
    kv_tokens: Annotated[
        int | None,
        Parameter(
            group=_SERVER,
            converter=whole,
            help="KV capacity of a rank in tokens, before graphs take their bytes out of it. By default what the "
            f"device has room for beside --config's weights, else {KV_TOKENS}.",
        ),
    ] = None
    block_size: Annotated[int, Parameter(group=_SERVER, converter=whole, help="Tokens of a KV block.")] = 16
    speculative: Annotated[
        int, Parameter(group=_SERVER, converter=whole, help="Draft tokens verified a decode row.")
    ] = 0
    acceptance: Annotated[
        float | None,
        Parameter(
            group=_SERVER,
            help="Probability that one of --speculative drafts is accepted, if all before it were. By default 0.7.",
        ),
    ] = None
    draft_us: Annotated[
        float | None,
        Parameter(group=_SERVER, help="Microseconds of drafting for one step with --speculative. By default 0."),
    ] = None
    scheduler_us: Annotated[
        float | None,
        Parameter(
            group=_SERVER,
            help="Microseconds of the serving engine's own work a step, which nothing overlaps. By default what the "
            "profile noted of kpolicy's own, else 0.",
        ),
    ] = None
    scheduler_prompt_us: Annotated[
        float | None,
        Parameter(
            group=_SERVER,
            help="More such microseconds for a step with prompts. By default the profile's too, and 0 beside "
            "--scheduler-us.",
        ),
    ] = None
    steady_host: Annotated[
        bool,
        Parameter(
            group=_SERVER,
            negative="",
            show_default=False,
            help="The host keeps the speed that the profile's launches are of, times --slower-host. By default it "
            "changes as was noted while the profile's calibration served, if it was.",
        ),
    ] = False
    slower_host: Annotated[
        float,
        Parameter(
            group=_SERVER,
            help="Fixed work takes the host so many times as long as the profile noted: what a busier host makes of "
            "it. Launching and scheduling go with it by 85%: 1.1 makes them 8.5% longer.",
        ),
    ] = 1.0
    ranks: Annotated[
        int, Parameter(group=_SERVER, converter=whole, help="Data-parallel ranks that step together and agree.")
    ] = 1
    concurrency: Annotated[
        int | None,
        Parameter(
            group=_SERVER,
            converter=whole,
            help="Clients, none of which has more than one request in the server: one that the trace has come while "
            "all wait comes with the next answer. No request comes sooner than the trace and --rate say. By default "
            "there is no limit.",
        ),
    ] = None
    prefix_reuse: Annotated[
        bool, Parameter(group=_SERVER, help="Reuse cached prefixes, where the trace has hash ids.")
    ] = True
    pace: Annotated[str | None, Parameter(group=_SERVER, help=PACE_HELP)] = None
    warm: Annotated[
        bool,
        Parameter(
            group=_SERVER,
            negative="",
            show_default=False,
            help="Graphs are captured before the first request comes. By default it waits for them.",
        ),
    ] = False
    slo_ttft_ms: Annotated[
        float | None, Parameter(group=_LEVEL, help="Most milliseconds to the first token of a good request.")
    ] = None
    slo_gap_ms: Annotated[
        float | None, Parameter(group=_LEVEL, help="Most milliseconds between its tokens, on its own average.")
    ] = None

    def costs(self, deployment: Deployment, profile: Path | None = None) -> CostModel:
        """The cost model that the options name; `profile` stands in for ``--profile``."""
        return cost_model(
            profile=profile or deployment.profile, config=deployment.config, device=self.device, tables=self.tables
        )

    def server(self, deployment: Deployment, model: CostModel) -> Server:
        """The server that the options describe.

        Raises:
            ConfigError: an option is out of range, or the model's weights leave no room for KV.
        """
        settings = settings_of(
            max_num_reqs=deployment.most_reqs(), max_num_tokens=("--max-num-tokens", self.max_num_tokens),
            num_speculative_tokens=("--speculative", self.speculative),
        )  # fmt: skip
        for option, value in (("--slo-ttft-ms", self.slo_ttft_ms), ("--slo-gap-ms", self.slo_gap_ms)):
            if value is not None and not 0 < value < 1e12:
                raise ConfigError(f"{option} is {value:g}; it takes milliseconds above 0.")
        for option, value in (
            ("--draft-us", self.draft_us), ("--scheduler-us", self.scheduler_us),
            ("--scheduler-prompt-us", self.scheduler_prompt_us),
        ):  # fmt: skip
            if value is not None and not 0 <= value < 1e9:
                raise ConfigError(f"{option} is {value:g}; it takes microseconds from 0 up.")
        if not LEAST_SLOWER <= self.slower_host <= MOST_SLOWER:
            raise ConfigError(
                f"--slower-host is {self.slower_host:g}; it is from {LEAST_SLOWER:g} to {MOST_SLOWER:g} times as long "
                "as the profile noted, 1 for just as long."
            )
        if self.slower_host != 1 and not model.costs.host_work_us:
            raise ConfigError(
                f"--slower-host {self.slower_host:g} needs costs that say how fast their host was, and these are "
                f"{model.what}. Give a --profile that kpolicy calibrate wrote, or leave it out."
            )
        check_pace(self.pace, deployment.support().claims, settings)
        server = Server(
            settings=settings,
            kv_tokens=self._kv_tokens(model),
            block_size=at_least("--block-size", self.block_size, 1),
            kv_bytes_per_token=model.kv_bytes_per_token,
            reuse_prefixes=self.prefix_reuse,
            drafts=self._drafts(),
            ranks=at_least("--ranks", self.ranks, 1),
            scheduler_us=self.scheduler_us,
            scheduler_prompt_us=self.scheduler_prompt_us,
            steady_host=self.steady_host,
            slower_host=self.slower_host,
            pace=self.pace,
            warm=self.warm,
            concurrency=None if self.concurrency is None else at_least("--concurrency", self.concurrency, 1),
            service_level=ServiceLevel(ttft_ms=self.slo_ttft_ms, gap_ms=self.slo_gap_ms),
        )
        # As it is simulated, for results that tell it.
        step_us, prompt_us = server.outside_us(model.costs)
        return attrs.evolve(server, scheduler_us=step_us, scheduler_prompt_us=prompt_us)

    def _drafts(self) -> Drafts:
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            raise ConfigError(f"--acceptance is {self.acceptance:g}; it is a probability from 0 to 1.")
        given: dict[str, float] = {}
        for name, value in (("acceptance", self.acceptance), ("draft_us", self.draft_us)):
            if value is None:
                continue
            if not self.speculative:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {value:g}, and nothing is drafted. Give --speculative too, the "
                    "drafts a row, or leave it out."
                )
            given[name] = value
        return Drafts(**given)

    def _kv_tokens(self, model: CostModel) -> int:
        if self.kv_tokens is not None:
            return at_least("--kv-tokens", self.kv_tokens, 1)
        if model.kv_tokens == 0:
            raise ConfigError(
                f"the weights of --config leave no room for KV on one {self.device or 'H200'}. Give --kv-tokens for a "
                "deployment that shares them, or another --device."
            )
        return KV_TOKENS if model.kv_tokens is None else model.kv_tokens
