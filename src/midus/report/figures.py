"""Pictures that stand beside result files, brought into the page."""

import base64
import struct
from pathlib import Path

from midus.report.document import Picture

_PNG = b"\x89PNG\r\n\x1a\n"


def embed_png(path: Path, alt: str, caption: str) -> Picture | None:
    """A PNG as part of the page; None where there is no such file.

    Args:
        path: The picture.
        alt: What it shows, for those who do not see it.
        caption: Under the picture.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return None
    # The signature, then the header chunk: length, name, width, height.
    if not data.startswith(_PNG) or len(data) < 24:
        return None
    width, height = struct.unpack(">II", data[16:24])
    uri = "data:image/png;base64," + base64.b64encode(data).decode("ascii")
    return Picture(uri, alt, caption, width, height)
