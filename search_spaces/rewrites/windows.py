"""Which rows of its input a window operator reads for some rows of its output.

Row ``r`` of the output looks at the rows from ``r * stride - before`` on. What lies outside the input is padding. All
ranges are half-open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

Range = tuple[int, int]


class Rows(NamedTuple):
    """What some rows of the output need.

    Attributes:
        read: rows of the input.
        before, after: rows of padding above and below them.
    """

    read: Range
    before: int
    after: int


class Slice(NamedTuple):
    """Rows of the input on which an operator that pads by itself (SAME) computes the rows wanted, and others.

    Attributes:
        read: rows of the input.
        skip: rows of what comes out that are not wanted, at its beginning.
        rows: how many rows come out.
    """

    read: Range
    skip: int
    rows: int


def padding(size: int, stride: int, rows_in: int, rows_out: int) -> Range:
    """Return how many rows the schema's SAME padding adds above and below; ``size`` counts the gaps of dilation."""
    total = max((rows_out - 1) * stride + size - rows_in, 0)
    return total // 2, total - total // 2


@dataclass(frozen=True, slots=True)
class Window:
    """A window that slides over one axis.

    Attributes:
        size: rows that it spans, the gaps of a dilated one included.
        stride: rows from one position to the next.
        rows_in, rows_out: of the whole operator.
        same: whether it pads (SAME).
    """

    size: int
    stride: int
    rows_in: int
    rows_out: int
    same: bool

    @property
    def before(self) -> int:
        """Rows of padding above the whole input."""
        return padding(self.size, self.stride, self.rows_in, self.rows_out)[0] if self.same else 0

    def needs(self, rows: Range) -> Rows:
        """Return what rows of the output need of the input, and the padding around that."""
        first = rows[0] * self.stride - self.before
        last = (rows[1] - 1) * self.stride - self.before + self.size
        return Rows((max(first, 0), min(last, self.rows_in)), max(0, -first), max(0, last - self.rows_in))

    def pads_alike(self, rows: Range) -> bool:
        """Return whether SAME, asked on just the rows that are needed, pads as those need it."""
        found = self.needs(rows)
        count = found.read[1] - found.read[0]
        made = -(-count // self.stride)
        wanted = found.before, found.after
        return self.same and made == rows[1] - rows[0] and padding(self.size, self.stride, count, made) == wanted

    def same_slice(self, rows: Range) -> Slice:
        """Return the fewest rows of the input on which SAME computes the rows wanted.

        Padding must not stand where the input has rows, so some rows more may have to be computed.
        """
        read = self.needs(rows).read
        reach = 2 * (self.size + self.stride)
        for extra in range(2 * reach + 1):
            for above in range(max(0, extra - reach), min(extra, reach) + 1):
                found = self._try(read[0] - above, read[1] + extra - above, rows)
                if found is not None:
                    return found
        return Slice((0, self.rows_in), rows[0], self.rows_out)

    def _try(self, first: int, last: int, rows: Range) -> Slice | None:
        if first < 0 or last > self.rows_in:
            return None
        made = -(-(last - first) // self.stride)
        start = first - padding(self.size, self.stride, last - first, made)[0]
        shift = rows[0] * self.stride - self.before - start
        skip = shift // self.stride
        wanted = rows[1] - rows[0]
        if shift % self.stride or skip < 0 or skip + wanted > made:
            return None
        begin = rows[0] * self.stride - self.before
        end = (rows[1] - 1) * self.stride - self.before + self.size
        if (first > 0 and begin < first) or (last < self.rows_in and end > last):
            return None
        return Slice((first, last), skip, made)


def transposed(size: int, stride: int, rows_in: int, rows_out: int, rows: Range, *, same: bool) -> Slice:
    """Return the rows of the input from which a transposed convolution computes rows of its output, and some more.

    The runtime pads as the convolution from its output to its input would.
    """
    before = padding(size, stride, rows_out, -(-rows_out // stride))[0] if same else 0
    first = min(max(0, -(-(rows[0] + before - size + 1) // stride)), rows[0] // stride, rows_in - 1)
    last = max(first + 1, min(rows_in, (rows[1] - 1 + before) // stride + 1))
    short = rows_in * stride - rows_out  # negative where windows reach beyond the last stride
    while last < rows_in and last * stride - short < rows[1]:
        last += 1
    return Slice((first, last), rows[0] - first * stride, (last - first) * stride - short)
