"""Pictures of a problem: a file, or the bytes of one."""

import base64
import io
from pathlib import Path

from PIL import Image

ImageSource = Path | bytes
_ERRORS = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""What Pillow raises at what is no picture; SyntaxError is its own of a broken PNG."""


def check_image(path: Path) -> None:
    """Raises ValueError when there is no picture at `path`, or a damaged one."""
    try:
        with Image.open(path) as image:
            image.draft("RGB", (1, 1))  # a JPEG is read whole, and decoded small
            if image.format == "PNG":
                image.verify()  # its checksums: a tenth of the time
            else:
                image.load()
    except FileNotFoundError as error:
        raise ValueError(f"no file {str(path)!r}") from error
    except _ERRORS as error:
        raise ValueError(f"{str(path)!r} is no picture that can be read ({error})") from error


def read_size(source: ImageSource) -> tuple[int, int]:
    """Width and height in pixels, from the header."""
    with Image.open(_openable(source)) as image:
        return image.size


def read_image(source: ImageSource) -> Image.Image:
    """The picture in RGB, as stored: an EXIF rotation is not applied.

    Raises:
        ValueError: the file is gone or damaged; names it.
    """
    try:
        with Image.open(_openable(source)) as image:
            return image.convert("RGB")
    except _ERRORS as error:
        raise ValueError(f"cannot read the picture {describe(source)} ({error})") from error


def describe(source: ImageSource) -> str:
    """For messages."""
    return str(source) if isinstance(source, Path) else f"of {len(source)} bytes"


def to_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG", compress_level=1)
    return file.getvalue()


def to_data_uri(image: Image.Image) -> str:
    """As PNG, which every decoder reads to the same pixels; a JPEG may differ between two of them."""
    return "data:image/png;base64," + base64.b64encode(to_png(image)).decode()


def _openable(source: ImageSource) -> Path | io.BytesIO:
    return source if isinstance(source, Path) else io.BytesIO(source)
