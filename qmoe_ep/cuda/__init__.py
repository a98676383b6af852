"""The CUDA provider: what callers hold, and the order of launches."""
