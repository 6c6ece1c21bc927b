"""Which token follows: logits, penalties, grammars and random numbers to token ids, a step's rows at once."""

from samovar.replicas.sampling.draws import greedy_of
from samovar.replicas.sampling.sampler import BegunSample, NotNumbers, Sampler

__all__ = ["BegunSample", "NotNumbers", "Sampler", "greedy_of"]
