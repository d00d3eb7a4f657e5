"""Plans on an NVIDIA GPU: stages captured as CUDA graphs, replayed on streams from one process."""
