"""The training run: experts and their engines, the step, the loop and what happens beside it."""
