"""One of two processes that decide together over gloo: RANK WORLD_SIZE INIT_METHOD POLICY STEPS.

Prints one line a step with what all ranks must have in common. The policy ``differ`` gives each rank another one.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from kpolicy.engine import Engine
from kpolicy.errors import RankError
from kpolicy.executors.simulated import SimulatedExecutor, reference_outputs
from kpolicy.ladders import CaptureSizes
from kpolicy.serving.torch_communicator import TorchCommunicator
from kpolicy.settings import Settings
from kpolicy.testing.sequences import NUM_BLOCKS, Row, Sequences

LIMITS = Settings(max_num_reqs=8, max_num_tokens=32)
SIZES = CaptureSizes((1, 2, 4, 8), (8, 16), (8, 32))


def check(rows: list[Row], outputs: Any) -> None:
    """Each wanted output is its sequence's own."""
    done, wanted = outputs.decision.decode_steps, []
    for i, row in enumerate(rows):
        start = row.sequence.num_computed
        known = row.sequence.tokens[: start + row.num_tokens]
        if row.decode:
            known = [*known, *(outputs.tokens[step][i] for step in range(done - 1))]
            start += done - 1
        own = reference_outputs(known, first=start)
        wanted += [own[offset] for offset in row.wanted]
    if list(outputs.outputs) != wanted:
        raise SystemExit(f"wrong outputs after {outputs.decision}")


def main(rank: int, world_size: int, init: str, policy: str, steps: int) -> None:
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    if policy == "differ":
        policy = ("auto", "split")[rank]
    # Rank 1 loses a graph on its way: both must go on without it.
    executor = SimulatedExecutor(num_blocks=NUM_BLOCKS, faults=["replay_fails@40"] if rank else ())
    communicator = TorchCommunicator()
    engine = Engine(policy, ladder=SIZES, settings=LIMITS, executor=executor, communicator=communicator)
    engine.capture()
    sequences, failures = Sequences(100 + rank), 0
    for step in range(steps):
        rows = [] if (step + rank) % 11 == 0 else sequences.random_rows(LIMITS.max_num_reqs, LIMITS.max_num_tokens)
        outputs = engine.step(sequences.inputs(rows, steps=1 + step % 4))
        check(rows, outputs)
        for tokens in outputs.tokens[: outputs.decision.decode_steps]:
            sequences.append([row for row in rows if row.decode], tokens)
        sequences.advance([row for row in rows if not row.decode])
        decision = outputs.decision
        failed = engine.stats.replay_failures != failures
        failures = engine.stats.replay_failures
        told = communicator.all_reduce_max([int(failed)])[0]
        keys = "; ".join(str(launch.key) for launch in decision.launches)
        # In the step of the failure the ranks' launches differ by design: one replays, one runs eagerly.
        line = "a graph was lost" if told else f"{decision.label} {keys} x{decision.decode_steps}"
        sys.stdout.write(f"{line}\n")
    if rank and not failures:
        raise SystemExit("the injected failure never came")


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
    except RankError as error:
        sys.stderr.write(f"RankError: {error}\n")
        sys.exit(3)
    finally:
        dist.destroy_process_group()
