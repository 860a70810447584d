"""Training of the Wan 2.1 and Wan 2.2 video diffusion transformers with DeepSpeed."""

__version__ = "0.1.0"
