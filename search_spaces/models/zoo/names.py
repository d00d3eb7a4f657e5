"""Names of the zoo's models: the list of models, and the syntax of variants.

::

    NAME [@WIDTH] [/SIZE] [+spectrum] [:int8 | :f16]

    vgg16                    the model as published
    mobilenet_v1@0.5         every layer half as wide; ``optimize models`` shows how channels are rounded
    mobilenet_v1@0.5/192     … for images of 192 by 192
    posenet/240x320          for images of 240 rows and 320 columns
    mobilebert/384           for sequences of 384 tokens
    resnet152+spectrum       weights whose singular values decay, for good low-rank approximations
    resnet50:int8            full integer quantisation, int8 in and out
    resnet50:f16             float16 weights, with the DEQUANTIZE operators of a converter
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from search_spaces.core.errors import ModelError

WHOLE = "to whole channels"
EIGHTS = "to multiples of 8"


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the zoo.

    Attributes:
        module: of this package; its function ``build`` makes the model.
        source: the paper, and the implementation that is followed.
        size: height and width of images, or the number of tokens.
        smallest: minimum of height and width, or tokens.
        step: height and width, or tokens, are multiples of it.
        rounding: how channels are rounded under a width multiplier.
        int8: why there is no ``:int8`` variant, or "" where there is one.
    """

    module: str
    source: str
    size: tuple[int, ...] = (224, 224)
    smallest: int = 32
    step: int = 1
    rounding: str = WHOLE
    int8: str = ""


@dataclass(frozen=True, slots=True)
class Spec:
    """The model that a name selects.

    Attributes:
        name: of the published model.
        width: multiplier of the channels.
        size: height and width, or tokens.
        spectrum: whether singular values of the weights decay.
        variant: ``""`` (float32), ``"int8"`` or ``"f16"``.
    """

    name: str
    width: float
    size: tuple[int, ...]
    spectrum: bool = False
    variant: str = ""

    @property
    def weights_name(self) -> str:
        """The canonical name of the float32 model, whose weights all variants share."""
        text = self.name
        if self.width != 1:
            text += f"@{self.width:g}"
        if self.size != ZOO[self.name].size:
            square = len(set(self.size)) == 1
            text += f"/{self.size[0]}" if square else f"/{self.size[0]}x{self.size[1]}"
        return text + ("+spectrum" if self.spectrum else "")

    @property
    def canonical(self) -> str:
        """The shortest name of this model: ``vgg16@1.0/224`` is ``vgg16``."""
        return self.weights_name + (f":{self.variant}" if self.variant else "")


_HEADS = "to whole attention heads"
_GROUPS = "groups to multiples of 8"
_VARIANCE = "it divides by a variance computed at run time, which 8 bits cannot represent"
_MASKS = "attention masks of -10,000 and scores do not fit the same 8 bits"

ZOO: Mapping[str, Entry] = {
    "alexnet": Entry("alexnet", "arXiv:1404.5997, torchvision", smallest=63),
    "densenet121": Entry("densenet", "arXiv:1608.06993, torchvision"),
    "efficientnet_lite0": Entry("efficientnet", "arXiv:1905.11946, Lite", rounding=EIGHTS),
    "fast_style_transfer": Entry("style", "arXiv:1603.08155, CoDL", (480, 640), 16, 4, int8=_VARIANCE),
    "googlenet": Entry("googlenet", "arXiv:1409.4842, torchvision"),
    "inception_v3": Entry("inception", "arXiv:1512.00567, torchvision", (299, 299), 75),
    "mobilebert": Entry("transformer", "arXiv:2004.02984", (128,), 8, 8, rounding=_HEADS, int8=_MASKS),
    "mobilenet_v1": Entry("mobilenet", "arXiv:1704.04861, hosted .tflite", rounding=EIGHTS),
    "mobilenet_v2": Entry("mobilenet", "arXiv:1801.04381, hosted .tflite", rounding=EIGHTS),
    "mobilenet_v3_large": Entry("mobilenet", "arXiv:1905.02244, torchvision", rounding=EIGHTS),
    "posenet": Entry("posenet", "arXiv:1602.00134, CoDL", (256, 256), step=8),
    "regnet_y_32gf": Entry("regnet", "arXiv:2003.13678, torchvision", rounding=_GROUPS),
    "resnet18": Entry("resnet", "arXiv:1512.03385, torchvision"),
    "resnet50": Entry("resnet", "arXiv:1512.03385, torchvision"),
    "resnet101": Entry("resnet", "arXiv:1512.03385, torchvision"),
    "resnet152": Entry("resnet", "arXiv:1512.03385, torchvision"),
    "retinaface": Entry("retinaface", "arXiv:1905.00641, CoDL", (640, 640), 64, 64),
    "squeezenet1_0": Entry("squeezenet", "arXiv:1602.07360, torchvision"),
    "squeezenet1_1": Entry("squeezenet", "arXiv:1602.07360, torchvision"),
    "vgg11": Entry("vgg", "arXiv:1409.1556, torchvision"),
    "vgg16": Entry("vgg", "arXiv:1409.1556, torchvision"),
    "vgg19": Entry("vgg", "arXiv:1409.1556, torchvision"),
    "vit_b16": Entry(
        "transformer", "arXiv:2010.11929, torchvision", (224, 224), 16, 16, rounding=_HEADS, int8=_VARIANCE
    ),
    "yolov2": Entry("yolov2", "arXiv:1612.08242, darknet", (416, 416), step=32),
}

WIDTHS = (0.125, 4.0)
LARGEST = 4096
VARIANTS = ("int8", "f16")

_FORM = re.compile(
    r"(?P<name>\w+)(?:@(?P<width>[^@/+:]*))?(?:/(?P<size>[^@/+:]*))?(?P<spectrum>\+[^@/+:]*)?(?::(?P<variant>[^@/+:]*))?"
)
GRAMMAR = "a name has the form NAME[@WIDTH][/SIZE][+spectrum][:int8|:f16]"


def is_name(text: str) -> bool:
    """Tell whether a text starts with a name of the zoo; what follows is not checked."""
    return _base(text) in ZOO


def nearest(text: str) -> str:
    """Return ``did you mean vgg16 or vgg19?``, or "" where no name is similar."""
    from difflib import get_close_matches

    base = _base(text).lower()
    longer = [name for name in ZOO if len(base) > 2 and name.startswith(base)]
    near = longer[:3] or get_close_matches(base, ZOO, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else ""


def parse_name(text: str) -> Spec:
    """Return the model of a name.

    Raises:
        ModelError: the name has another form, or the zoo has no such model; the text lists its models.
    """
    found = _FORM.fullmatch(text)
    if found is None or found["name"] not in ZOO:
        hint = GRAMMAR if is_name(text) else nearest(text) or f"give one of: {', '.join(sorted(ZOO))}"
        raise ModelError(f"{text!r} is not a built-in model", hint)
    entry = ZOO[found["name"]]
    if found["spectrum"] not in {None, "+spectrum"}:
        raise ModelError(f"{text}: there is no {found['spectrum']!r}", "the only one is +spectrum")
    return Spec(
        found["name"],
        _width(text, found["width"]),
        _size(text, found["size"], entry),
        found["spectrum"] is not None,
        _variant(text, found["variant"], entry),
    )


def _base(text: str) -> str:
    return re.split("[@/+:]", text, maxsplit=1)[0]


def _width(text: str, given: str | None) -> float:
    if given is None:
        return 1.0
    low, high = WIDTHS
    # At most three decimals, so that equal widths have equal names.
    if re.fullmatch(r"\d(\.\d{1,3})?", given, re.ASCII) is None or not low <= float(given) <= high:
        raise ModelError(
            f"{text}: the width multiplier {given!r} cannot be used",
            f"give a number from {low:g} to {high:g} with at most three decimals",
        )
    return float(given)


def _size(text: str, given: str | None, entry: Entry) -> tuple[int, ...]:
    if given is None:
        return entry.size
    images = len(entry.size) == 2
    form = r"\d{1,5}(x\d{1,5})?" if images else r"\d{1,5}"
    sides = tuple(map(int, given.split("x"))) if re.fullmatch(form, given, re.ASCII) else ()
    if not sides or any(side % entry.step or not entry.smallest <= side <= LARGEST for side in sides):
        what = "a side, or HEIGHTxWIDTH, in pixels" if images else "a number of tokens"
        multiples = f", multiples of {entry.step}" if entry.step > 1 else ""
        side, _, count = given.partition("x")
        more = f"; {count} copies are {text.replace(given, side)}*{count}" if re.fullmatch(r"\d+x\d+", given) else ""
        raise ModelError(
            f"{text}: the size {given!r} cannot be used",
            f"give {what}: {entry.smallest} to {LARGEST}{multiples}{more}",
        )
    return sides * 2 if images and len(sides) == 1 else sides


def _variant(text: str, given: str | None, entry: Entry) -> str:
    if given is None:
        return ""
    if given not in VARIANTS:
        raise ModelError(f"{text}: there is no variant {given!r}", f"the variants are :{' and :'.join(VARIANTS)}")
    if given == "int8" and entry.int8:
        raise ModelError(f"{text}: there is no :int8 of this model: {entry.int8}", "take :f16")
    return given
