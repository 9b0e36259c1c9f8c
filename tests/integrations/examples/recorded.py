"""What the adapters rely on of mini-sglang and nano-vllm: names and parameters alone, as read in their repositories.

Neither is published as a package that a test could hold this to. A commit is the one that a file was read at; it need
not be of the main branch. To look again, read the files at a newer commit and change both.
"""

from __future__ import annotations

READ_AT: dict[str, dict[str, str]] = {
    "sgl-project/mini-sglang": {
        "python/minisgl/engine/graph.py": "44030762813c3be9d70a5856645cb505ba290154",
        "python/minisgl/engine/engine.py": "001b82454d3345c9ea478b086f1e2ceed6fe4fa7",
        "python/minisgl/core.py": "20d410143b15501c5e573760c6fc5181ae6915f5",
        "python/minisgl/scheduler/scheduler.py": "04340eedbf9f3e7eccc7977fd0ceccc8a9e087e1",
    },
    "GeeeekExplorer/nano-vllm": {
        "nanovllm/engine/model_runner.py": "359f8cadd54537687378247c437def9aafbd0faa",
        "nanovllm/engine/llm_engine.py": "0700c1bc11a1630e4da15320748e880b8c4e2f03",
        "nanovllm/config.py": "06005bd4602e0dc6e4c80e64c159658dbc468fae",
    },
}

SIGNATURES: dict[str, dict[str, str]] = {
    "mini_sglang": {
        "GraphRunner.__init__": (
            "self, stream, device, model, attn_backend, cuda_graph_bs, cuda_graph_max_bs, free_memory, max_seq_len, "
            "vocab_size, dummy_req"
        ),
        "GraphRunner.can_use_cuda_graph": "self, batch",
        "GraphRunner.pad_batch": "self, batch",
        "GraphRunner.replay": "self, batch",
    },
    "nano_vllm": {
        "ModelRunner.__init__": "self, config, rank, event",
        "ModelRunner.capture_cudagraph": "self",
        "ModelRunner.run_model": "self, input_ids, positions, is_prefill",
    },
}

BY_NAME = ("GraphRunner.__init__",)
"""What the engine calls with names alone; it calls the others by position."""

ATTRIBUTES: dict[str, dict[str, tuple[str, ...]]] = {
    "mini_sglang": {
        "self": ("graph_bs_list", "max_graph_bs", "dummy_req"),
        "batch": ("is_decode", "size", "reqs", "padded_reqs"),
        "req": ("extend_len", "cached_len"),
        "dummy_req": ("table_idx",),
    },
    "nano_vllm": {
        "self": ("config", "enforce_eager", "graph_bs"),
        "config": ("max_num_seqs",),
        "input_ids": ("size",),
    },
}
"""Attributes that the published classes have, by what the adapters call the object."""

IMPORTED: dict[str, dict[str, str]] = {
    "mini_sglang": {"minisgl.engine.engine": "GraphRunner", "minisgl.engine.graph": "GraphRunner"},
    "nano_vllm": {"nanovllm.engine.llm_engine": "ModelRunner", "nanovllm.engine.model_runner": "ModelRunner"},
}
"""Modules that have the class by that name: where it is, and where the engine makes it."""
