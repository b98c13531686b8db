"""Language models as one file of llama.cpp, GGUF; begin with ``export``."""
