"""The mathematics of flow matching for Wan: path, distributions of the noise level, loss weightings."""
