"""One replica on several GPUs: ranks that each hold a part of the model and of every block, led by rank 0."""

from samovar.replicas.ranks.channel import RankLost
from samovar.replicas.ranks.group import Launch, LeadingRunner, RankGroup, RankProcess, RankSubprocess
from samovar.replicas.ranks.meeting import ChannelPlan
from samovar.replicas.ranks.worker import RankStart, serve_rank, start_of

__all__ = [
    "ChannelPlan",
    "Launch",
    "LeadingRunner",
    "RankGroup",
    "RankLost",
    "RankProcess",
    "RankStart",
    "RankSubprocess",
    "serve_rank",
    "start_of",
]
