"""What serving needs besides the core: parts that import torch. Nothing here is imported by the core."""
