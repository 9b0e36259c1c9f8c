"""NVIDIA GPUs (and what presents itself as CUDA) through torch: `CudaExecutor`, and `CudaAdapter` below it."""

from kpolicy.executors.cuda.adapter import CudaAdapter
from kpolicy.executors.cuda.executor import CudaExecutor

__all__ = ["CudaAdapter", "CudaExecutor"]
