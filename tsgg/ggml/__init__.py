"""The wrapper around ggml: devices, buffers, graph builder, persistent graphs. Knows nothing of models."""
