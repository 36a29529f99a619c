"""Independent completions of each prompt: the baselines' sampling."""

from megatron_eqlen.sampling.independent.compare import compare
from megatron_eqlen.sampling.independent.group import harvesters, open_share
from megatron_eqlen.sampling.independent.meter import draws, nothing_more, shape
from megatron_eqlen.sampling.independent.picture import picture
from megatron_eqlen.sampling.independent.record import join, parts
from megatron_eqlen.sampling.kind import SamplingKind
from megatron_eqlen.types import Group

KIND = SamplingKind(
    "independent",
    Group,
    harvesters,
    compare,
    picture,
    parts,
    join,
    shape,
    nothing_more,
    draws=draws,
    open_share=open_share,
)
