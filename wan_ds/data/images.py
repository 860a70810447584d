"""Image files as frames: what an image-to-video model is shown when it is sampled.

Letters: H height, W width.
"""

from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from wan_ds.data.clips import covering_size, fitted, to_pixels
from wan_ds.errors import DataError


def read_image(path: str | Path, *, height: int, width: int) -> torch.Tensor:
    """The image as float32 ``[3, H, W]`` in [-1, 1], RGB, fitted as the frames of a training clip are.

    It is turned as its EXIF orientation says; what is transparent becomes white. Raises ``DataError`` if it
    is no image file.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such image file")
    try:
        with Image.open(path) as file:
            image = ImageOps.exif_transpose(file)
            if image.has_transparency_data:
                layers = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers)
            levels = np.array(image.convert("RGB"))
    except UnidentifiedImageError as error:
        raise DataError(f"{path}: not an image that can be read; convert it to PNG or JPEG") from error
    except (OSError, SyntaxError) as error:  # Pillow's errors for damaged files
        raise DataError(f"{path}: the image is damaged ({error}); save it again") from error
    picture, size = torch.from_numpy(levels).permute(2, 0, 1), (height, width)
    scaled = covering_size(picture.shape[1], Fraction(picture.shape[2]), size)
    return to_pixels(fitted(picture, scaled, size))
