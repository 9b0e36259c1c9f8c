"""kpolicy inside vLLM: `kpolicy_vllm.plugin` is what vLLM loads, `kpolicy_vllm.config` says what can be set."""

__version__ = "0.1.0"
