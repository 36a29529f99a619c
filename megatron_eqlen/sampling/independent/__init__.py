"""Independent completions of each prompt: the baselines' sampling."""

from megatron_eqlen.sampling.independent.group import harvesters
from megatron_eqlen.sampling.independent.meter import shape
from megatron_eqlen.sampling.kind import SamplingKind
from megatron_eqlen.types import Group

KIND = SamplingKind("independent", Group, harvesters, shape)
