"""The training run: experts and their engines, the step, the loop and what happens beside it."""

import logging

# diffusers' image pipelines import CLIP's processor by a name that wants torchvision, and are told at length
# that there is another one: the one that is used here.
logging.getLogger("transformers.utils.import_utils").setLevel(logging.ERROR)
