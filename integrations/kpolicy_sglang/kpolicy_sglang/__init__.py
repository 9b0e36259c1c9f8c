"""kpolicy inside SGLang, as one of SGLang's own plugins. `kpolicy_sglang.plugin` is where it begins."""

__version__ = "0.1.0"
