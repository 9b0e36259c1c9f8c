"""Stock vLLM beside vLLM with the shim of `integrations/kpolicy_vllm`, on one GPU."""
