"""Plans on an NVIDIA GPU: stages as captured CUDA graphs, replayed on streams from one process (seed 001)."""
