"""kpolicy inside SGLang."""
