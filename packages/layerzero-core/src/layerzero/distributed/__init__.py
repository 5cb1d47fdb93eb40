"""Many ranks as one: they agree at the start, choose alike afterwards, and never wait for each other without end."""

from layerzero.distributed.agreement import Agreement, agree
from layerzero.distributed.channel import Channel, RankStore
from layerzero.distributed.facts import Facts, Findings, judge

__all__ = ["Agreement", "Channel", "Facts", "Findings", "RankStore", "agree", "judge"]
