"""Number formats of weights as data, and the description of a matrix in one of them.

A value is element(code)·scale·global scale, where the element of an integer code is code − zero point and that of a
float code is the small float that its bits spell. Everything else about a format is a field of
:class:`WeightFormat`; another format is another entry of :data:`FORMATS`, and a decode rule for its elements if those
are new. Letters as in :mod:`qmoe_ep.operator`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "FLOAT_DTYPES",
    "FORMATS",
    "Element",
    "ExpertMatrix",
    "Experts",
    "Gating",
    "MatrixLayout",
    "WeightFormat",
    "element_values",
    "packed_bytes",
    "scale_values",
]

FLOAT_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
UINT8 = np.dtype(np.uint8)
E4M3, E8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)

Element: TypeAlias = Literal["integer", "e2m1", "e4m3"]
Gating: TypeAlias = Literal["none", "interleaved", "halves", "fc3"]
"""Where the up half of a gated activation comes from: nowhere, odd rows of FC1, the second half of
the rows of FC1, or FC3."""

MatrixLayout: TypeAlias = Literal["raw", "sm80", "columns"]
"""Order of the packed codes: rows of in features; that of ONNX Runtime's CUDA provider for integers; or, for 4-bit
floats, [in, out/2], two neighbouring out features a byte."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One value of the attribute ``quant_type``.

    Attributes
    ----------
    name : the attribute's value
    element : what a code spells
    bits : of a code; 0 where attributes say it
    block_size : weights of a row that share a scale; 0 where an attribute says it
    scale_dtypes : of the scales; the bytes of 8-bit ones may also come as uint8
    square_blocks : a block is as many rows high as it is columns wide, and may be cut at the matrix's end
    global_scale : a float32 scale per expert: never there, always, or exactly where there are no blocks
    """

    name: str
    element: Element
    bits: int = 0
    block_size: int = 0
    scale_dtypes: tuple[np.dtype[Any], ...] = FLOAT_DTYPES
    square_blocks: bool = False
    global_scale: Literal["never", "always", "without blocks"] = "never"

    @property
    def weight_dtypes(self) -> tuple[np.dtype[Any], ...]:
        """Dtypes that packed weights may come in."""
        return (UINT8, E4M3) if self.element == "e4m3" else (UINT8,)


_MXFP4 = WeightFormat("fp4", "e2m1", 4, 32, (E8M0, UINT8), global_scale="always")

FORMATS = {
    form.name: form
    for form in (
        WeightFormat("int", "integer"),
        _MXFP4,
        WeightFormat("nvfp4", "e2m1", 4, 16, (E4M3, UINT8), global_scale="always"),
        WeightFormat("fp8", "e4m3", 8, square_blocks=True, global_scale="without blocks"),
        # Activations are exact; the scales by which they could be rounded to 8 bits are checked and not used.
        replace(_MXFP4, name="wfp4afp8"),
    )
}


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that ``count`` codes of ``bits`` bits occupy, padded to a byte."""
    return (count * bits + 7) // 8


def element_values(codes: NDArray[np.uint8], element: Element, dtype: Any) -> NDArray[Any]:
    """What float codes spell, exactly, in ``dtype`` (float32 or float64); the shape stays.

    e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, negative with bit 3. e4m3: the bits of a float8_e4m3fn.
    """
    table = _E2M1 if element == "e2m1" else np.arange(256, dtype=np.uint8).view(E4M3)
    values: NDArray[Any] = table.astype(dtype)[codes]
    return values


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def scale_values(scales: NDArray[Any], form: WeightFormat, dtype: Any) -> NDArray[Any]:
    """Scales as numbers in ``dtype``; the bytes of 8-bit floats are taken for what they are."""
    if scales.dtype == UINT8:
        scales = scales.view(form.scale_dtypes[0])
    values: NDArray[Any] = scales.astype(dtype)
    return values


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """One quantized matrix per expert, in rows of ``in_features``.

    ``block_size`` 0 means one scale per row, or with square blocks none but the global one. Integers without zero
    points have 2^(bits−1) for it; ``zero_point_dtype`` is uint8 for packed codes or that of float ones.
    """

    name: str
    bits: int
    block_size: int
    out_features: int
    in_features: int
    layout: MatrixLayout
    scale_dtype: np.dtype[Any]
    zero_points: bool
    bias_dtype: np.dtype[Any] | None
    form: WeightFormat = FORMATS["int"]
    zero_point_dtype: np.dtype[Any] = UINT8

    @property
    def plain(self) -> bool:
        """Integers whose zero points, if there are any, are packed: what every way to compute knows."""
        return self.form.element == "integer" and self.zero_point_dtype == UINT8

    @property
    def global_scale(self) -> bool:
        """Whether there is a float32 scale per expert."""
        rule = self.form.global_scale
        return rule == "always" or (rule == "without blocks" and not self.block_size)

    @property
    def scaled(self) -> bool:
        """Whether there is a tensor of scales."""
        return not (self.form.square_blocks and not self.block_size)

    @property
    def element_scale_dtype(self) -> np.dtype[Any] | None:
        """Dtype of the scales, what their bytes are where they come as uint8; None without a tensor of scales."""
        if not self.scaled:
            return None
        return self.form.scale_dtypes[0] if self.scale_dtype == UINT8 else self.scale_dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one packed row."""
        return packed_bytes(self.in_features, self.bits)

    @property
    def blocks(self) -> int:
        """Scales per row."""
        return -(-self.in_features // self.block_size) if self.block_size else 1

    @property
    def block_rows(self) -> int:
        """Rows that share their scales."""
        return self.block_size if self.form.square_blocks and self.block_size else 1

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the packed weights of one expert."""
        if self.layout == "columns":
            return (self.in_features, packed_bytes(self.out_features, self.bits))
        return (self.out_features, self.row_bytes)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scales of one expert; row-wise ones may have a last dimension of 1 besides."""
        if not self.block_size:
            return (self.out_features,) if self.scaled else ()
        return (-(-self.out_features // self.block_rows), self.blocks)

    @property
    def zero_point_shape(self) -> tuple[int, ...]:
        """Shape of the zero points of one expert."""
        if self.zero_point_dtype != UINT8:
            return self.scale_shape
        if self.block_size:
            return (self.out_features, packed_bytes(self.blocks, self.bits))
        return (packed_bytes(self.out_features, self.bits),)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: packed weights, scales and zero points, as a decode step reads them."""
        scales = math.prod(self.scale_shape) * self.scale_dtype.itemsize if self.scaled else 0
        points = math.prod(self.zero_point_shape) * self.zero_point_dtype.itemsize if self.zero_points else 0
        return self.out_features * self.row_bytes + scales + points + 4 * self.global_scale


@dataclass(frozen=True, slots=True)
class Experts:
    """The weights' side of a call: what is constant over a node's life."""

    num_experts: int
    hidden_size: int
    inter_size: int
    gating: Gating
    fc1: ExpertMatrix
    fc2: ExpertMatrix
    fc3: ExpertMatrix | None

    @property
    def matrices(self) -> tuple[ExpertMatrix, ...]:
        """FC1, FC2 and, where present, FC3."""
        return (self.fc1, self.fc2) if self.fc3 is None else (self.fc1, self.fc2, self.fc3)

    def with_raw_layout(self) -> Experts:
        """The same experts after a conversion of their weights to the raw layout."""
        fc3 = None if self.fc3 is None else replace(self.fc3, layout="raw")
        return replace(self, fc1=replace(self.fc1, layout="raw"), fc2=replace(self.fc2, layout="raw"), fc3=fc3)
