"""Single-device modules: the transformer, the encoders, and where their weights come from."""
