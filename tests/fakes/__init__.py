"""An Ascend NPU that isn't there: `device` has its streams and events, `npu` torch_npu's names over them."""
