"""Sums over survivors that end, whatever happens to the peers: the contract and its backends."""
from recover.collectives.contract import GATHER_LIMIT, Backend, Group, Work, create, names, register
from recover.collectives.tcp import TcpBackend

register("tcp", TcpBackend)

__all__ = ["GATHER_LIMIT", "Backend", "Group", "Work", "create", "names", "register"]
