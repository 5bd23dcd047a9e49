"""The metadata of OME-TIFF: images with their axes, pages and places, read from untrusted XML and written.

The text is read as a stream: no tree of it is built, and document types with their entities are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from xml.parsers import expat
from xml.sax.saxutils import quoteattr

from znnpy.messages import excerpt
from znnpy.volume.lengths import SHORT, length_unit
from znnpy.volume.space import Space

MOST_BYTES = 2**26  # of the text
MOST_IMAGES = 10_000
NAMESPACE = "http://www.openmicroscopy.org/Schemas/OME/2016-06"
TYPES = {"uint8": "uint8", "float16": "half", "float32": "float"}  # of voxels
UNITS = {**SHORT, "micrometer": "µm", "angstrom": "Å"}  # as its schema spells them
UNKNOWN_UNIT = "reference frame"  # of a length whose unit is not known


@dataclass(frozen=True, slots=True)
class PageRun:
    """Planes of an image that lie in pages of a file.

    page   the first one; None: the first page of the file, and all that follow
    count  of pages; None: one, or all where no page is named
    first  the index of the first plane along each axis, by its name in small letters
    file   the id of the file; None: this one
    """

    page: int | None
    count: int | None
    first: Mapping[str, int]
    file: str | None = None


@dataclass(slots=True)
class OmeImage:
    """One image of a file.

    sizes    number of pixels along x, y, z, c and t
    order    of the planes' axes, the fastest first: "zct"
    samples  channels that lie in one page
    """

    name: str
    sizes: dict[str, int]
    order: str
    runs: list[PageRun] = field(default_factory=list)
    samples: int = 1
    lengths: dict[str, str] = field(default_factory=dict)  # attributes with physical sizes
    place: dict[str, str] = field(default_factory=dict)  # attributes with the position of the first plane

    @property
    def space(self) -> Space | None:
        """The position of the voxels; None where their size is not stated."""
        found = [_number(self.lengths.get(f"PhysicalSize{axis}", "")) for axis in "ZYX"]
        z, y, x = (size if size is not None and size > 0 else None for size in found)
        if y is None or x is None:
            return None
        units = [length_unit(self.lengths.get(f"PhysicalSize{axis}Unit", "µm")) for axis in "ZYX"]
        place = [_number(self.place.get(f"Position{axis}", "0")) for axis in "ZYX"]
        said = [self.place.get(f"Position{axis}Unit", UNKNOWN_UNIT) for axis in "ZYX"]
        if None in place or any(length_unit(one) != unit for one, unit in zip(said, units, strict=True)):
            place = [0.0, 0.0, 0.0]  # a position of the stage, in units of its own
        at = [one or 0.0 for one in place]
        return Space((z or 1.0, y, x), (at[0], at[1], at[2]), (units[0], units[1], units[2]))


class _Reader:
    """The images that a text names, collected while it is parsed."""

    def __init__(self) -> None:
        self.images: list[OmeImage] = []
        self.own: str | None = None  # the id of this file
        self._name = ""
        self._text: str | None = None  # of the element that names a file
        self._file_name = ""

    def refuse(self, *_: object) -> None:
        raise ValueError("its OME-XML has a document type, and such are not read")

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        word = tag.rpartition(" ")[2]
        if word == "OME":
            self.own = attributes.get("UUID")
        elif word == "Image":
            self._name = attributes.get("Name") or attributes.get("ID") or ""
        elif word == "Pixels":
            self._pixels(attributes)
        elif word == "Channel" and self.images:
            self.images[-1].samples = _whole(attributes.get("SamplesPerPixel", "1"))
        elif word == "TiffData" and self.images:
            self._run(attributes)
        elif word == "UUID":
            self._text, self._file_name = "", attributes.get("FileName", "")
        elif word == "Plane" and self.images and all(attributes.get(f"The{axis}", "0") == "0" for axis in "ZCT"):
            self.images[-1].place = attributes

    def text(self, part: str) -> None:
        if self._text is not None:
            self._text += part

    def end(self, tag: str) -> None:
        if self._text is not None and tag.rpartition(" ")[2] == "UUID" and self.images and self.images[-1].runs:
            runs = self.images[-1].runs
            last = runs[-1]
            runs[-1] = PageRun(last.page, last.count, last.first, self._text.strip())
        self._text = None

    def _pixels(self, attributes: dict[str, str]) -> None:
        if len(self.images) >= MOST_IMAGES:
            raise ValueError(f"its OME-XML has more than {MOST_IMAGES:,} images")
        order = attributes.get("DimensionOrder", "XYZCT").lower()
        if sorted(order) != sorted("xyzct") or not order.startswith("xy"):
            raise ValueError(f"its OME-XML has the order {excerpt(order, 20)}")
        sizes = {axis: _whole(attributes.get(f"Size{axis.upper()}", "1")) for axis in order}
        if min(sizes.values()) < 1:
            raise ValueError(f"its OME-XML has the sizes {excerpt(sizes, 80)}")
        self.images.append(OmeImage(self._name, sizes, order[2:], lengths=attributes))

    def _run(self, attributes: dict[str, str]) -> None:
        page, count = (attributes.get(name) for name in ("IFD", "PlaneCount"))
        first = {axis: _whole(attributes.get(f"First{axis.upper()}", "0")) for axis in "zct"}
        self.images[-1].runs.append(
            PageRun(None if page is None else _whole(page), None if count is None else _whole(count), first)
        )


def read_ome(text: str) -> tuple[list[OmeImage], str | None]:
    """Read OME-XML: the images, and the id of the file itself, if it has one. ValueError if it is damaged."""
    reader = _Reader()
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.StartDoctypeDeclHandler = reader.refuse
    parser.EntityDeclHandler = reader.refuse
    parser.StartElementHandler = reader.start
    parser.CharacterDataHandler = reader.text
    parser.EndElementHandler = reader.end
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        raise ValueError(f"its OME-XML is damaged: {error}") from None
    return reader.images, reader.own


def ome_xml(name: str, shape: tuple[int, int, int, int], dtype: str, space: Space | None) -> str:
    """Return the OME-XML of an image of one file, whose planes (c, z) follow one another.

    shape  (c, z, y, x)
    dtype  one of TYPES
    """
    c, z, y, x = shape
    lengths = place = ""
    if space is not None:
        for axis, size, at, unit in zip("ZYX", space.scale, space.translation, space.units, strict=True):
            known = length_unit(unit) if unit else None
            word = quoteattr(UNITS[known] if known else UNKNOWN_UNIT)
            lengths += f' PhysicalSize{axis}="{size!r}" PhysicalSize{axis}Unit={word}'
            place += f' Position{axis}="{at!r}" Position{axis}Unit={word}'
    channels = "".join(f'<Channel ID="Channel:0:{n}" SamplesPerPixel="1"/>' for n in range(c))
    return (
        '<?xml version="1.0" encoding="UTF-8"?>'
        f'<OME xmlns="{NAMESPACE}" Creator="znnpy"><Image ID="Image:0" Name={quoteattr(name)}>'
        f'<Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="{TYPES[dtype]}" BigEndian="false" Interleaved="false" '
        f'SizeX="{x}" SizeY="{y}" SizeZ="{z}" SizeC="{c}" SizeT="1"{lengths}>'
        f'{channels}<TiffData IFD="0" PlaneCount="{c * z}"/>'
        + (f'<Plane TheZ="0" TheC="0" TheT="0"{place}/>' if place else "")
        + "</Pixels></Image></OME>"
    )


def _whole(text: str) -> int:
    if not text.strip().isdecimal() or len(text) > 18:
        raise ValueError(f"its OME-XML has the number {excerpt(text, 20)!r}")
    return int(text)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None
