"""`Works`: what moves the rows of one buffer, opened by the first dispatch that needs it.

A dispatch brings its own shapes, so one buffer may need several carriers. Every rank comes here with the same shapes
and sizes, in the same order. Knows nothing of what is done with rows. `buffer.ElasticBuffer` calls it.
"""

from collections.abc import Iterator

from bywash.deepep.request import Way
from bywash.deepep.work import Work
from bywash.exchange import Group
from bywash.exchange.carriers import open_carrier


class Works:
    """Carriers by the way that rows take."""

    def __init__(self, group: Group, tokens: int) -> None:
        """Open nothing yet; `tokens` is the most that a rank will bring, as far as is known."""
        self._group, self._tokens = group, tokens
        self._works: dict[Way, list[Work]] = {}

    def __iter__(self) -> Iterator[Work]:
        return (work for works in self._works.values() for work in works)

    def fitting(self, way: Way, most: int, num_sms: int) -> Work:
        """For rows of a way, from ranks with up to `most` tokens.

        A dispatch larger than all before it opens another carrier, since handles may still want the smaller one back.
        """
        works = self._works.setdefault(way, [])
        work = next((work for work in works if work.carrier.room is None or work.carrier.room >= most), None)
        if work is None:
            carrier = open_carrier(
                self._group,
                cuda=way.cuda,
                tokens=max(most, self._tokens),
                top_ranks=min(way.format.top_k, self._group.ranks),
                columns=way.columns,
                dtype=way.out_dtype,
                sent_bytes=way.format.bytes,
                narrow=way.narrow,
            )
            work = Work.of(carrier, way.format)
            works.append(work)
        work.carrier.use_multiprocessors(num_sms)
        return work

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        for work in self:
            work.carrier.close()
        self._works.clear()
