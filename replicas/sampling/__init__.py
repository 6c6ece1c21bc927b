"""Which token follows: logits, penalties, grammars and random numbers to token ids, a step's rows at once."""

from samovar.replicas.sampling.draws import Sampled, greedy_of
from samovar.replicas.sampling.sampler import BegunSample, NotNumbers, Sampler

__all__ = ["BegunSample", "NotNumbers", "Sampled", "Sampler", "greedy_of"]
