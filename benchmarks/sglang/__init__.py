"""kpolicy inside SGLang against SGLang as it is."""
