"""Plans on Android phones: stages timed there one by one by LiteRT's benchmark_model, transfers estimated."""
