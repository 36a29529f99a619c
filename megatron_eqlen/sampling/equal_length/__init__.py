"""Equal-length pairs from dual-track streams: the paper's sampling."""

from megatron_eqlen.sampling.equal_length.compare import compare, takes_part
from megatron_eqlen.sampling.equal_length.dual_track import harvesters
from megatron_eqlen.sampling.equal_length.meter import compared, draws, shape
from megatron_eqlen.sampling.equal_length.picture import picture
from megatron_eqlen.sampling.equal_length.record import join, parts
from megatron_eqlen.sampling.kind import SamplingKind
from megatron_eqlen.types import Stream

KIND = SamplingKind(
    "equal_length", Stream, harvesters, compare, picture, parts, join, shape, compared, takes_part, draws
)
