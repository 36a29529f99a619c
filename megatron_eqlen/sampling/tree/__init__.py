"""Trees of steps, each step continued several times: TreeRPO's sampling."""

from megatron_eqlen.sampling.independent.meter import nothing_more
from megatron_eqlen.sampling.kind import SamplingKind
from megatron_eqlen.sampling.tree.branching import harvesters
from megatron_eqlen.sampling.tree.compare import compare
from megatron_eqlen.sampling.tree.meter import draws, shape
from megatron_eqlen.sampling.tree.picture import picture
from megatron_eqlen.sampling.tree.record import join, parts
from megatron_eqlen.types import SampledTree

KIND = SamplingKind(
    "tree", SampledTree, harvesters, compare, picture, parts, join, shape, nothing_more, draws=draws
)
