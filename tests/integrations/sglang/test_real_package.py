"""The whole SGLang, where it is installed: its own loader, its own arguments. It needs no GPU."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from kpolicy.attention.fields import identity
from kpolicy.attention.support import Claims
from kpolicy.ladders import CaptureSizes
from kpolicy.schemas import LadderPlan, write_plan
from kpolicy.settings import Settings

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang isn't installed")

MODEL = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 256,
    "intermediate_size": 512, "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 4096, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "torch_dtype": "bfloat16",
}  # fmt: skip

LOAD = """
import sglang.srt.managers.scheduler, sglang
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
from kpolicy_sglang import hooks
from kpolicy_sglang.plugin import not_taken
from kpolicy_sglang.versions import known
wanted = known(sglang.__version__).hooks
found = {"missing": not_taken(wanted, HookRegistry), "patched": len(HookRegistry._patched), "hooks": len(wanted),
         "on": hooks.configured() is not None, "version": sglang.__version__}
"""

FROZEN = """
import gc
from types import SimpleNamespace
from kpolicy_sglang.captures import collected_once
from sglang.srt.model_executor.runner import decode_cuda_graph_runner, prefill_cuda_graph_runner
found["frozen"] = []
for on in (True, False):
    with collected_once(SimpleNamespace(server_args=SimpleNamespace()), on=on):
        for module in (prefill_cuda_graph_runner, decode_cuda_graph_runner):
            with module.freeze_gc(False):
                inside = gc.get_freeze_count()
            found["frozen"].append([inside > 0, gc.get_freeze_count() > 0])
found["frozen"].append(gc.get_freeze_count())
"""

SIZES = """
from sglang.srt.server_args import ServerArgs
args = ServerArgs(model_path=MODEL, load_format="dummy", skip_tokenizer_init=True, device="cpu",
                  max_running_requests=768, attention_backend="torch_native")
args.disable_cuda_graph = False
if found["version"].startswith("0.5.16"):
    args.cuda_graph_config.prefill.backend = "breakable"
    args._disable_breakable_cudagraph_if_incompatible()
    found["prefill"] = args.cuda_graph_config.prefill.backend
    args.cuda_graph_config.prefill.backend = "breakable"
    found["few"] = args._generate_prefill_cuda_graph_batch_sizes(2048)
    found["decode_sizes"] = args._generate_decode_cuda_graph_batch_sizes(256)
else:
    from sglang.srt.arg_groups import cuda_graph_hook
    found["decode_sizes"] = cuda_graph_hook.generate_decode_cuda_graph_batch_sizes(args, 256)
    found["prefill_sizes"] = cuda_graph_hook.generate_prefill_cuda_graph_batch_sizes(8192)
import pickle
from kpolicy_sglang.arguments import own_sizes
found["own"] = own_sizes(pickle.loads(pickle.dumps(args)))
"""

MEMORY = """
if found["version"].startswith("0.5.23"):
    import sglang.srt.arg_groups.memory_hook as memory
    import sglang.srt.model_executor.cuda_graph_config as graphs
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.server_args import ServerArgs
    args = ServerArgs(model_path=MODEL, load_format="dummy", skip_tokenizer_init=True, device="cpu",
                      attention_backend="torch_native")
    asked_for = graphs.CudaGraphConfig()
    for name, backend in (("decode", "full"), ("prefill", "breakable")):
        phase = getattr(asked_for, name)
        phase.bs, phase.max_bs, phase.backend = None, None, backend
    declare_resolution(args, "a test", cuda_graph_config=asked_for, device="cuda", mem_fraction_static=None,
                       chunked_prefill_size=None)
    memory.get_device_memory_capacity = lambda device: GIB * 1024.0
    memory.handle_gpu_memory_settings(args)
    decode = resolving_view(args).cuda_graph_config.decode
    found.update(largest=decode.max_bs, decode_sizes=list(decode.bs))
"""


def asked(code, **environ):
    """What the code finds, in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code + "\nimport json\nprint('FOUND ' + json.dumps(found))"],
        env={**os.environ, "SGLANG_PLUGINS": "kpolicy", **environ}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[-1][len("FOUND ") :])


def test_sglangs_loader_applies_every_hook():
    """With the package installed, SGLang finds its entry point, and every hook is called."""
    found = asked(LOAD, KPOLICY_SGLANG="1", KPOLICY_STRICT="1")
    assert found["on"]
    assert found["missing"] == []
    assert found["patched"] == found["hooks"]


def test_nothing_is_hooked_when_off():
    """Without being turned on nothing of SGLang is touched."""
    environ = {name: "" for name in os.environ if name.startswith("KPOLICY_")}
    found = asked(LOAD, **environ, KPOLICY_SGLANG="0")
    assert (found["patched"], found["on"]) == (0, False)


def test_objects_stay_frozen_between_the_real_captures():
    """SGLang's own `freeze_gc`, as its two runners call it, unfreezes nothing within kpolicy's, and does without."""
    found = asked(LOAD + FROZEN, KPOLICY_SGLANG="1", KPOLICY_STRICT="1")
    assert found["frozen"] == [[True, True]] * 2 + [[True, False]] * 2 + [0]


def test_real_arguments_get_kpolicys_sizes(tmp_path):
    """SGLang's own 36 decode sizes, and three up to the requests that may run; 0.5.16's MLA rule where it was asked."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    code = LOAD + SIZES.replace("MODEL", repr(str(tmp_path)), 1)
    assert asked(code, KPOLICY_SGLANG="1", KPOLICY_STRICT="1").get("prefill", "disabled") == "disabled"
    found = asked(code, KPOLICY_SGLANG="1", KPOLICY_STRICT="1", KPOLICY_MLA_PREFILL="1")
    assert found["decode_sizes"][-1] == 768
    assert found["decode_sizes"][:4] == [1, 2, 4, 8]
    assert len(found["decode_sizes"]) == 36 + 3
    assert found.get("prefill", "breakable") == "breakable"
    assert found.get("prefill_sizes", [8192])[-1] == 8192
    few = [64, 256, 512, 1024, 2048]
    assert found.get("few", few) == few
    # SGLang's own, which other processes have with the arguments; it has no graphs of MLA prompts on 0.5.16.
    assert found["own"] == ({"decode": 36, "prefill": 0} if "few" in found else {"decode": 36})


@pytest.mark.parametrize(("hidden", "largest"), [(256, 16), (512, 256)])
def test_a_plan_is_held_to_the_real_config(tmp_path, hidden, largest):
    """SGLang's own config of the model is at hand when it asks for sizes: another model's plan isn't taken."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    plan = LadderPlan(
        sizes=CaptureSizes((1, 16), (), (64,)), keys=(), settings=Settings(), attention=Claims.at_level("mixed"),
        planned_from={"model": identity({**MODEL, "hidden_size": hidden})},
    )  # fmt: skip
    write_plan(tmp_path / "plan.json", plan)
    code = LOAD + SIZES.replace("MODEL", repr(str(tmp_path)), 1)
    found = asked(code, KPOLICY_SGLANG="1", KPOLICY_PLAN=str(tmp_path / "plan.json"))
    assert found["decode_sizes"][-1] == largest
    assert len(found["decode_sizes"]) == (2 if hidden == MODEL["hidden_size"] else 36)


@pytest.mark.parametrize(("gib", "above"), [(141, [384, 512, 768, 1024]), (24, [])])
def test_real_memory_settings_keep_sglangs_sizes(tmp_path, gib, above):
    """0.5.23 sets the largest size and then asks for the list: it is its own, and on a large GPU four sizes more."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    code = LOAD + MEMORY.replace("MODEL", repr(str(tmp_path)), 1).replace("GIB", str(gib))
    stock = asked(code, KPOLICY_SGLANG="0")
    if not stock["version"].startswith("0.5.23"):
        pytest.skip("0.5.16 asks for the list before it sets the largest size")
    found = asked(code, KPOLICY_SGLANG="1", KPOLICY_STRICT="1")
    assert found["decode_sizes"] == stock["decode_sizes"] + above
    assert found["largest"] == found["decode_sizes"][-1]


def served(folder, how):
    """What `tests.integrations.sglang.serve` says."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.integrations.sglang.serve", str(folder), how],
        env={**os.environ, "KPOLICY_SGLANG": "0" if how.startswith("stock") else "1", "SGLANG_PLUGINS": "kpolicy"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SERVED ")] or [done.stderr[-3000:]]
    return json.loads(line.removeprefix("SERVED "))


on_a_cpu = pytest.mark.skipif(
    os.environ.get("KPOLICY_SGLANG_CPU") != "1",
    reason="KPOLICY_SGLANG_CPU=1 says that this SGLang 0.5.16 runs on a CPU",
)


@on_a_cpu
def test_split_changes_no_token(tmp_path):
    """Through the real scheduler, chunked prompts too: split or limited cycles and turns give stock tokens."""
    found = {}
    for how in ("stock", "mixed", "split", "gap", "turns"):
        found[how] = served(tmp_path, how)
        assert found[how]["done"] == 16
    for how in ("mixed", "split", "gap", "turns"):
        assert found[how]["tokens"] == found["stock"]["tokens"], how
        # Its cycles don't go through the wrapper of SGLang's registry.
        assert found[how]["past_registry"]
    assert found["stock"]["cycles"] is None
    assert not found["stock"]["past_registry"]
    assert found["mixed"]["cycles"]["mixed"] > 5
    assert found["split"]["cycles"]["mixed"] == 0
    assert min(found["split"]["cycles"][order] for order in ("decode first", "extend first")) > 0
    assert found["turns"]["cycles"]["in turns"] > 0


@on_a_cpu
def test_long_prompts_apart_change_no_token(tmp_path):
    """Through the real scheduler: batches end before what makes them long, and prompts and tokens are stock ones."""
    stock, ours = (served(tmp_path, how) for how in ("stock-long", "long"))
    assert stock["done"] == ours["done"] == 16
    assert ours["tokens"] == stock["tokens"]
    beside = [max(batch) for batch in ours["batches"] if len(batch) > 1 and max(batch) > 1024]
    apart = [batch for batch in ours["batches"] if sum(batch) < 4096 and max(batch) > 1024]
    assert apart
    assert len(beside) < len([batch for batch in stock["batches"] if len(batch) > 1 and max(batch) > 1024])
